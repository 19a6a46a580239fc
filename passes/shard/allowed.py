"""Which states a sharding problem may choose from: what a baseline leaves, what the user's constraints pin, and where
parameters rest already."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from autopar.errors import ConstraintError, ShardingError
from autopar.ir.mesh import Mesh
from autopar.ir.program import Program
from autopar.ir.spec import Spec, parse_spec
from autopar.passes.rules.alphabet import alphabet, shared_axes
from autopar.passes.rules.book import RuleBook
from autopar.passes.rules.structure import parameter_groups
from autopar.passes.shard.baselines import Baseline
from autopar.passes.shard.factors.graph import Key
from autopar.passes.shard.uneven import DATA
from autopar.plan import ParameterPlan
from autopar.runtime.comm.mesh import Shares
from autopar.runtime.data.schema import did_you_mean

_MOST_SHOWN = 8
"""Specs that an error names."""
Allowed = Callable[[Key, Any], bool]
"""Whether a variable may take a state."""


def allowed_states(
    program: Program,
    mesh: Mesh,
    rules: RuleBook,
    strategy: str,
    constraints: Mapping[str, str],
    stored: Mapping[str, ParameterPlan] = MappingProxyType({}),
) -> Allowed | None:
    """The filter of states that a strategy, the user's constraints and the storage that is given leave; None where they
    leave everything. Raises ConstraintError, and InfeasibleError where the program cannot have the strategy."""
    filters = [
        Baseline(strategy, program, mesh, rules).allows if strategy != "auto" else None,
        _by_group(program, constraint_filter(program, mesh, constraints)),
        _by_group(program, _storage_filter(stored)),
        _equally_at_rest(program, mesh),
    ]
    given = [f for f in filters if f is not None]
    if len(given) < 2:
        return given[0] if given else None
    return lambda key, state: all(f(key, state) for f in given)


def _equally_at_rest(program: Program, mesh: Mesh) -> Allowed | None:
    """Nothing rests in unequal blocks along axes that batches take, as rows may move along them between steps."""
    moving = {axis for axis, size in mesh.axes if axis in DATA and isinstance(size, Shares)}

    def allowed(key: Key, state: Any) -> bool:
        if key[0] != "param":
            return True
        shape = program.parameters[key[1]].type.shape
        dims = (zip(shape, spec.dims, strict=True) for spec in state)
        return not any(moving & set(axes) and mesh.is_uneven(n, axes) for spec in dims for n, axes in spec)

    return allowed if moving else None


def _storage_filter(stored: Mapping[str, ParameterPlan]) -> Allowed | None:
    """Pins of parameters by their names."""
    pins: dict[Key, tuple[Spec, Spec]] = {
        ("param", n): (p.storage.unassigned, p.optimizer.unassigned) for n, p in stored.items()
    }
    return (lambda key, state: key not in pins or state == pins[key]) if pins else None


def check_constraints(program: Program, constraints: Mapping[str, str]) -> None:
    """Raises ConstraintError for a pattern that matches nothing and for text that is no spec, whatever the mesh."""
    for pattern, text in constraints.items():
        spec = _parsed(pattern, text)
        if not _matched(program, pattern, spec):
            named = [name for name in program.parameters if fnmatch.fnmatchcase(_module_of(name), pattern)]
            if named:
                shapes = ", ".join(f"{name} {list(program.parameters[name].type.shape)}" for name in named[:4])
                raise ConstraintError(
                    f"constraint {pattern!r}: no parameter of this module has {len(spec.dims)} dims, as {text} has; write one "
                    f"entry per dim of {shapes}"
                )
            names = ", ".join(list(program.parameters)[:4])
            raise ConstraintError(
                f"constraint pattern {pattern!r} matches no parameter and no value; parameters are {names}, …"
                f"{did_you_mean(pattern, [*program.parameters, *map(_module_of, program.parameters)])}"
            )


def constraint_filter(program: Program, mesh: Mesh, constraints: Mapping[str, str]) -> Allowed | None:
    """Pins by name pattern, of what the program has of those names. Raises ConstraintError for specs that cannot be on the
    mesh."""
    if not constraints:
        return None
    pins: dict[Key, Spec] = {}
    for pattern, text in constraints.items():
        spec = _parsed(pattern, text)
        for key, shape in _matched(program, pattern, spec):
            unknown = spec.axes - set(mesh.names)
            if unknown:
                raise ConstraintError(
                    f"constraint {pattern!r} uses axis {', '.join(sorted(unknown))}, the mesh is {mesh}; name its axes or set "
                    f"Options.mesh; possible for {key[-1]} are {_possible(shape, mesh)}"
                )
            if len(shape) != len(spec.dims) or not spec.divides(shape, mesh) or (spec.run and key[0] == "at"):
                raise ConstraintError(
                    f"constraint {pattern!r}: {text} does not fit {key[-1]} of shape {shape} on mesh {mesh}: it needs one "
                    "entry per dim, every sharded dim must divide by its axes, and parameters alone rest in runs; shard another "
                    f"dim or take another mesh; possible are {_possible(shape, mesh)}"
                )
            pins[key] = spec

    def allowed(key: Key, state: Any) -> bool:
        if key[0] == "param":
            return key not in pins or state[0] == pins[key]
        pin = pins.get((key[0], key[1], key[2].split("@")[0])) if key[0] == "at" else None
        return pin is None or state == pin

    return allowed


def _possible(shape: tuple[int, ...], mesh: Mesh) -> str:
    """The specs that a tensor of this shape may rest in on a mesh, for people."""
    letters = alphabet(shared_axes(mesh), len(shape))
    specs = [str(spec) for spec in letters.specs if not spec.partial and spec.divides(shape, mesh)]
    return ", ".join(specs[:_MOST_SHOWN]) + (", …" if len(specs) > _MOST_SHOWN else "")


def _parsed(pattern: str, text: str) -> Spec:
    """The spec that a constraint asks for. Raises ConstraintError where it is none."""
    try:
        spec = parse_spec(text)
    except ShardingError as error:
        raise ConstraintError(f"constraint {pattern!r}: {error}") from error
    if spec.owner is not None:
        raise ConstraintError(
            f"constraint {pattern!r}: {text} names the owner of a tensor, which is chosen with all others; leave it out"
        )
    return spec


def _matched(program: Program, pattern: str, spec: Spec) -> list[tuple[Key, tuple[int, ...]]]:
    """The names that a pattern means, with their shapes: parameters and values that it matches; or, where it matches none, the
    parameters of the modules that it matches which have as many dims as the spec."""
    named = [
        (key, shape)
        for key, shape in _named(program)
        if fnmatch.fnmatchcase(key[1] if key[0] == "param" else f"{key[1]}.{key[2]}", pattern)
    ]
    return named or [
        (("param", name), p.type.shape)
        for name, p in program.parameters.items()
        if len(p.type.shape) == len(spec.dims) and fnmatch.fnmatchcase(_module_of(name), pattern)
    ]


def _module_of(parameter: str) -> str:
    """The module that has a parameter."""
    return parameter.rpartition(".")[0]


def _named(program: Program) -> Iterator[tuple[Key, tuple[int, ...]]]:
    """Every name that a constraint's pattern may match, with its shape: parameters, and values that ops read."""
    for name, parameter in program.parameters.items():
        yield ("param", name), parameter.type.shape
    for template in program.templates.values():
        for value in template.consumers:
            if value not in template.params:
                yield ("at", template.name, value), template.type_of(value).shape


def _by_group(program: Program, f: Allowed | None) -> Allowed | None:
    """Pins of any member of a parameter group apply to the group's variable (named by its first member)."""
    if f is None:
        return None
    groups = parameter_groups(program)

    def allowed(key: Key, state: Any) -> bool:
        if key[0] == "param":
            return all(f(("param", n), state) for n in groups[key[1]].names)
        return f(key, state)

    return allowed
