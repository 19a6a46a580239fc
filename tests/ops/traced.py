"""The oracle for gradients: a function captured and differentiated as in a model, then run on real tensors.

The template's values and gradients must be those of eager autograd, and every op in it, those of backward included, must
give the same on shards under every strategy of its rule.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from autopar.capture.templates.differentiate import trace_template
from autopar.capture.templates.fold import Segment
from autopar.ir.mesh import Mesh
from autopar.ir.program import Template, is_getitem, op_call
from autopar.ir.rule import Rule, Strategy
from autopar.passes.rules.book import RuleBook
from autopar.proof.compare import difference, largest
from tests.ops.execution import Case, as_node, check_strategy

Tensor = torch.Tensor
Function = Callable[..., Any]
MESHES = (Mesh.of(a=2), Mesh.of(a=4), Mesh.of(a=2, b=2))
TOLERANCE = 1e-12


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors of a function's result."""
    return [t for t in (value if isinstance(value, (tuple, list)) else [value]) if isinstance(t, Tensor)]


def traced(function: Function, tensors: Sequence[Tensor]) -> Template:
    """The template that autopar makes of `function`; gradients flow to the tensors that require them."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        reads = [torch.empty(t.shape, dtype=t.dtype).requires_grad_(t.requires_grad) for t in tensors]
        graph = make_fx(lambda *xs: tensors_of(function(*xs)), pre_dispatch=True)(*reads).graph
    placeholders = tuple(n for n in graph.nodes if n.op == "placeholder")
    nodes = tuple(n for n in graph.nodes if n.op == "call_function")
    writes: tuple[fx.Node, ...] = tuple(graph.output_node().args[0])  # type: ignore[arg-type]
    pulled = [_is_float(n.meta["val"]) for n in writes]
    segment = Segment(nodes, placeholders, writes, "", "")
    return trace_template("op", segment, reads, [False] * len(reads), pulled, mode)[0]


def _is_float(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def of_tensors(case: Case) -> tuple[Function, list[Tensor]]:
    """A case as a function of its tensors, to which gradients flow where they can."""
    node, tensors = as_node(case, case.whole())
    names = [n.name for n in node.graph.nodes if n.op == "placeholder"]

    def function(*values: Tensor) -> Any:
        by_name = dict(zip(names, values, strict=True))
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: by_name[n.name])
        return case.target(*args, **kwargs)

    weighted = str(case.target).startswith("aten.binary_cross_entropy")  # whose weights have no gradient in torch
    flows = 2 if weighted else len(tensors)
    return function, [t.detach().requires_grad_(_is_float(t) and k < flows) for k, t in enumerate(tensors)]


def traceable(case: Case) -> bool:
    """Whether capture takes the case: it has operands, defined values and shapes that do not depend on the data."""
    if case.shapes_only or not any(isinstance(t, Tensor) for t in case.args):
        return False
    masks = any(isinstance(t, Tensor) and t.dtype == torch.bool for a in case.args if isinstance(a, list) for t in a)
    return not masks


def run(template: Template, tensors: Sequence[Tensor], tangents: Sequence[Tensor]) -> dict[str, Any]:
    """Every value of the template by name."""
    values: dict[str, Any] = dict(zip(template.inputs, tensors, strict=True))
    values |= dict(zip([t for t in template.tangents if t is not None], tangents, strict=True))
    for node in template.graph.nodes:
        if node.op == "call_function":
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: values[n.name])
            values[node.name] = node.target(*args, **kwargs)
    return values


def close(one: Tensor, other: Tensor) -> bool:
    """Equal to 1e-12 of the largest entry, NaN and infinities where the other has them."""
    same_shape = one.shape == other.shape and one.dtype == other.dtype
    return same_shape and difference(one, other) <= TOLERANCE * max(largest(other), 1.0)


def check_gradients(function: Function, tensors: Sequence[Tensor]) -> tuple[Template, dict[str, Any]]:
    """The template of `function` and its values on `tensors`.

    Raises AssertionError unless values and gradients are those of eager autograd.
    """
    leaves = [t.detach().clone().requires_grad_(t.requires_grad) for t in tensors]
    expected = tensors_of(function(*leaves))
    template = traced(function, tensors)
    generator = torch.Generator().manual_seed(1)
    tangents = [
        torch.randn(t.shape, dtype=t.dtype, generator=generator)
        for t, slot in zip(expected, template.tangents, strict=True)
        if slot is not None
    ]
    values = run(template, [t.detach() for t in tensors], tangents)
    for i, (name, value) in enumerate(zip(template.outputs, expected, strict=True)):
        assert close(values[name], value.detach()), f"result {i} is {values[name]}, eager has {value}"
    heads = [t for t, slot in zip(expected, template.tangents, strict=True) if slot is not None]
    wanted = [(i, t) for i, t in enumerate(leaves) if t.requires_grad]
    grads = torch.autograd.grad(heads, [t for _, t in wanted], tangents, allow_unused=True) if heads and wanted else ()
    for (i, _), grad in zip(wanted, grads, strict=False):
        name = template.input_grads[i]
        assert (name is None) == (grad is None), f"gradient {i}: {name} is given, eager has {grad}"
        if grad is not None:
            assert close(values[name], grad), f"gradient {i} is {values[name]}, eager has {grad}"
    return template, values


def check_shards(template: Template, values: dict[str, Any], rules: RuleBook, meshes: Sequence[Mesh] = MESHES) -> int:
    """Every op of the template under every strategy of its rule. Returns how many were tried."""
    generator, tried = torch.Generator().manual_seed(2), 0
    for node, case, whole in _computed(template, values):
        if not all(map(_finite, (case.args, case.kwargs, values[node.name]))):
            continue  # a sum that is owed on infinity is NaN
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            rule = rules.rule(op_call(as_node(case, whole)[0]))
        for mesh in meshes:
            for strategy in rule.strategies(mesh):
                if any(strategy):
                    _check_strategy(node, case, whole, mesh, strategy, generator, rule)
                    tried += 1
    return tried


def check_carried(template: Template, values: dict[str, Any], rules: RuleBook, mesh: Mesh) -> set[str]:
    """Every op of the template under the choices that come with messages. Returns which ops have any on this mesh."""
    generator, carried = torch.Generator().manual_seed(2), set()
    for node, case, whole in _computed(template, values):
        rule = rules.rule(op_call(as_node(case, whole)[0]))
        for strategy in rule.strategies(mesh):
            if any(choice in rule.carries for choice in strategy):
                _check_strategy(node, case, whole, mesh, strategy, generator, rule)
                carried.add(str(node.target).removesuffix(".default"))
    return carried


def _computed(template: Template, values: dict[str, Any]) -> Iterator[tuple[fx.Node, Case, list[Tensor | None]]]:
    """Every op of the template as a case, with its results."""
    for node in template.graph.nodes:
        if node.op == "call_function" and not is_getitem(node):
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: values[n.name])
            value = values[node.name]
            results = value if isinstance(value, (tuple, list)) else [value]
            case = Case(node.target, args, kwargs, "empty" in node.name)
            yield node, case, [t if isinstance(t, Tensor) else None for t in results]


def _check_strategy(
    node: fx.Node,
    case: Case,
    whole: list[Tensor | None],
    mesh: Mesh,
    strategy: Strategy,
    generator: torch.Generator,
    rule: Rule,
) -> None:
    try:
        check_strategy(case, whole, mesh, strategy, generator, rule)
    except Exception as error:
        raise AssertionError(f"{node.format_node()} under {strategy} of {rule}: {error}") from error


def _finite(value: Any) -> bool:
    if isinstance(value, Tensor):
        return not _is_float(value) or bool(value.isfinite().all())
    values = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return all(map(_finite, values))
