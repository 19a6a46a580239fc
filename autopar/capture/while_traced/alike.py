"""Modules that are called alike are traced once: the second layer of a stack is the first one with other parameters.

While a step is traced, a call of a block (a numbered child of a container) that is like one before it does not run. One op
takes its place in the graph, and `autopar.capture.export.repeated` puts the earlier call's nodes there, so that the graph is
the one that a full trace gives. The user's loop runs as it is written:

    for block in self.blocks:     block 0   traced, between the ops `begin` and `end`, which name its roles and results
        x = block(x, cos)         block 1   `repeat(0, [x, cos, its parameters])`, if all that block 0 read is equal in it

Python is deterministic, so a call goes the way of another one if all that the other one read is equal. What a call may read
is its arguments and modules (`Description`), and state that both can reach (`autopar.capture.before.state`), which must not
have changed since. Attributes may differ where the traced call never looked (the number of a layer). A call that changes
state, asks about data, writes to tensors, runs a known forward or a user's autograd.Function is traced every time.
"""

from __future__ import annotations

import collections
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental import proxy_tensor
from torch.nn.modules import module as torch_module
from torch.utils import _pytree as pytree

from autopar.capture.before.attribute_watch import watched_attributes
from autopar.capture.before.state import State, state_of
from autopar.capture.explain import is_user_file
from autopar.capture.source_lines import is_block
from autopar.capture.while_traced import functions
from autopar.capture.while_traced.description import PLAIN, TABLES, Description, Unlike, is_given, settings
from autopar.capture.while_traced.repeat_ops import BEGIN, END, REPEAT, Made, made_as
from autopar.capture.while_traced.set_aside import SetAside
from autopar.ops.chosen import gradient_if

_MISSES = 4
"""After so many blocks of a family that no later call was like, the family is traced every time."""
_IN_FULL = [False]
Attribute = tuple[int, str]
"""A module, by id of its attributes or number, and the name of an attribute; "" stands for all."""


@dataclass
class Block:
    """A traced call. path: of its module, as the tracer names it. started: how often each module had been called before, by
    path; called: how often those inside were called since. reads: attributes, by number of the module. leaves, structure: what
    it returned, of ("made", number), ("role", number) and ("plain", value). bound: roles that its likes must share with it.
    repeated: how many calls were like it."""

    number: int
    path: str
    started: dict[str, int]
    described: Description
    state: State
    reads: set[Attribute] = field(default_factory=set)
    called: dict[str, int] = field(default_factory=dict)
    made: list[Made] = field(default_factory=list)
    leaves: list[tuple[str, Any]] = field(default_factory=list)
    structure: Any = None
    bound: frozenset[int] = frozenset()
    repeated: int = 0


@dataclass(frozen=True, eq=False)
class Repeated:
    """A call that was not traced: the one that it is like; where its module is, and its `Block.started`. aside: the names of
    roles that are parameters set aside, None for those that the op in its place reads."""

    like: Block
    path: str
    started: dict[str, int]
    aside: tuple[str | None, ...]


class Repeats:
    """The blocks of one trace and the calls that are like them. noted: what watches the trace; a call after which it says
    something else is traced every time. is_followed: whether the trace knows more of a tensor than its type."""

    def __init__(self, model: nn.Module) -> None:
        self.blocks: list[Block] = []
        self.repeated: list[Repeated] = []
        self.noted: Callable[[], Any] = tuple
        self.is_followed: Callable[[Tensor], bool] = lambda tensor: False
        self.families = _families(model)
        self.aside = SetAside(model, _later(model, self.families))
        self._sizes = collections.Counter(self.families.values())
        self._by_family: dict[Any, list[Block]] = {}
        self._traced_in: collections.Counter[Any] = collections.Counter()
        self._reading: list[set[Attribute]] = []
        self._called: set[int] = set()
        self._tracer: Any = None

    def call(self, tracer: Any, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The result of `forward` for a module that the tracer is in; or its like, without running it."""
        base = tracer.proxy_modules.get(module, module)
        family = self.families[id(base)]
        self._tracer = self._tracer or tracer
        if tracer is not self._tracer or torch_module._has_any_global_hook():
            return forward(*args, **kwargs)
        blocks = self._by_family.setdefault(family, [])
        alone = self._sizes[family] < 2 and id(base) not in self._called  # it may be called again
        self._called.add(id(base))
        if alone or (self._traced_in[family] >= _MISSES and not any(block.repeated for block in blocks)):
            return forward(*args, **kwargs)
        try:
            with torch._C.DisableTorchFunction():  # looks at tensors that are none of the user's
                described = Description(base, args, kwargs, self.is_followed)
        except Unlike:
            return forward(*args, **kwargs)
        path = tracer.path_of_module(module)
        for block in reversed(blocks):
            if _alike(block, described):
                return self._repeat(tracer, block, described, path)
        self._traced_in[family] += 1
        block = Block(len(self.blocks), path, dict(tracer.num_calls), described, state_of(base, (args, kwargs)))
        self.blocks.append(block)
        return self._traced(tracer, block, blocks, forward, args, kwargs)

    def _repeat(self, tracer: Any, block: Block, described: Description, path: str) -> Any:
        block.repeated += 1
        started = {}
        for inner, times in block.called.items():
            own = moved(inner, block.path, path)
            started[own] = tracer.num_calls.get(own, 0)
            tracer.num_calls[own] = started[own] + times
        for reads in self._reading:
            reads |= {(id(vars(described.modules[i])), name) for i, name in block.reads}
        with torch._C.DisableTorchFunction(), made_as(block.made, described.tensors):
            aside = tuple(self.aside.names[id(t)] if self.aside.is_unread(t) else None for t in described.tensors)
            self.repeated.append(Repeated(block, path, started, aside))
            read = [t for t, name in zip(described.tensors, aside, strict=True) if name is None]
            made = REPEAT(len(self.repeated) - 1, read)
        values = {"made": made, "role": described.tensors}
        leaves = [what if kind == "plain" else values[kind][what] for kind, what in block.leaves]
        return pytree.tree_unflatten(leaves, block.structure)

    def _traced(
        self, tracer: Any, block: Block, alike: list[Block], forward: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """The result of `forward`; the block is added to `alike` where there may be calls that are like it."""
        before, reads = (self.noted(), settings()), set[Attribute]()
        with torch._C.DisableTorchFunction():
            BEGIN(block.number, block.described.tensors)
        begin = _last(tracer.graph)
        with self._noting(reads):
            out = forward(*args, **kwargs)
        if (self.noted(), settings()) == before and not block.state.changes():
            try:
                block.bound = _bound(block)
                place = {id(vars(module)): i for i, module in enumerate(block.described.modules)}
                block.reads = {(place[owner], name) for owner, name in reads if owner in place}
                counts = {inner: n - block.started.get(inner, 0) for inner, n in tracer.num_calls.items()}
                block.called = {inner: n for inner, n in counts.items() if n}
                made = self._returned(block, out)
                block.made = [
                    (tuple(t.shape), t.stride(), t.dtype, roles)
                    for t, roles in zip(made, _reached(made, block.described.tensors), strict=True)
                ]
                with torch._C.DisableTorchFunction():
                    END(block.number, made)
                _check_inside(begin, _last(tracer.graph))
                alike.append(block)
            except Unlike:
                pass
        return out

    @contextmanager
    def _noting(self, reads: set[Attribute]) -> Iterator[None]:
        """Within the context attributes that are read or bound are noted."""

        def note(module: nn.Module, name: str) -> None:
            owner = id(object.__getattribute__(module, "__dict__"))
            if name != "__dict__" or is_user_file(sys._getframe(2).f_code.co_filename):
                for noted in self._reading:
                    noted.add((owner, "" if name == "__dict__" else name))

        self._reading.append(reads)
        try:
            with watched_attributes(note, note, note) if len(self._reading) == 1 else nullcontext():
                yield
        finally:
            self._reading.pop()

    def _returned(self, block: Block, out: Any) -> list[Tensor]:
        """The tensors that a call made and returned. Raises Unlike for what its likes could not return."""
        leaves, block.structure = pytree.tree_flatten(out)
        made: list[Tensor] = []
        for leaf in leaves:
            if not isinstance(leaf, Tensor):
                if not isinstance(leaf, (*PLAIN, float)):
                    raise Unlike
                block.leaves.append(("plain", leaf))
            elif (role := block.described.places.get(id(leaf))) is not None:
                block.leaves.append(("role", role))
            elif type(leaf) is not FakeTensor or leaf.layout is not torch.strided or self.is_followed(leaf):
                raise Unlike
            else:
                number = next((i for i, t in enumerate(made) if t is leaf), len(made))
                made += [leaf] if number == len(made) else []
                block.leaves.append(("made", number))
        memory = [t.untyped_storage()._cdata for t in made]
        shared = {t.untyped_storage()._cdata for t in block.described.tensors}
        if len(set(memory)) < len(memory) or not shared.isdisjoint(memory):
            raise Unlike  # what is written to one of them is written to another one
        return made


def moved(inner: str, path: str, to: str) -> str:
    """The path of a module at or below `path`, where that is `to`; other paths as they are."""
    return to + inner[len(path) :] if inner == path or inner.startswith(path + ".") else inner


@contextmanager
def repeats(model: nn.Module) -> Iterator[Repeats]:
    """Within the context calls of modules that are alike are traced once."""
    found = Repeats(model)
    tracer = proxy_tensor._ModuleStackTracer
    plain = tracer.call_module

    def call_module(self: Any, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        base = self.proxy_modules.get(m, m)
        if base is model:
            with found.aside.shown(self):
                return plain(self, m, forward, args, kwargs)
        if id(base) not in found.families or (base is m and m not in self.submodule_paths):
            return plain(self, m, forward, args, kwargs)
        return plain(self, m, lambda *a, **k: found.call(self, m, forward, a, k), args, kwargs)

    if _IN_FULL[0]:
        yield found
        return
    with mock.patch.object(tracer, "call_module", call_module), found.aside.hidden(), found.aside.read_as_nodes():
        yield found


@contextmanager
def traced_in_full() -> Iterator[None]:
    """Within the context every call is traced."""
    before, _IN_FULL[0] = _IN_FULL[0], True
    try:
        yield
    finally:
        _IN_FULL[0] = before


def _families(model: nn.Module) -> dict[int, Any]:
    """By id, the modules that may be blocks, and what those that are alike have in common: class and shapes of parameters."""
    families: dict[int, Any] = {}
    for name, module in model.named_modules():
        cls = type(module)
        if name.rpartition(".")[2].isdigit() and is_block(f"{cls.__module__}.{cls.__qualname__}"):
            if not any("forward" in vars(part) or _reads_its_way(type(part)) for part in module.modules()):
                families[id(module)] = cls, tuple(tuple(p.shape) for p in module.parameters())
    return families


def _later(model: nn.Module, families: dict[int, Any]) -> list[nn.Module]:
    """The blocks that are not the first of their family."""
    seen: set[Any] = set()
    later: list[nn.Module] = []
    for module in model.modules():
        family = families.get(id(module))
        if family is not None and family in seen:
            later.append(module)
        seen.add(family)
    return later


def _reads_its_way(cls: type) -> bool:
    """Whether attributes of a module's instances are found by code of the user's."""
    return any("__getattribute__" in vars(base) for base in cls.__mro__ if base not in (nn.Module, object))


def _alike(block: Block, described: Description) -> bool:
    """Whether a call goes the way of a traced one."""
    one = block.described
    if one.fixed != described.fixed:
        return False
    every = {i for i, name in block.reads if not name}
    names = block.reads | {key for key in (*one.attributes, *described.attributes) if key[0] in every}
    if any(one.attributes.get(key) != described.attributes.get(key) for key in names):
        return False
    if any(one.tensors[i] is not described.tensors[i] for i in block.bound):
        return False
    return not block.state.changes()


def _bound(block: Block) -> frozenset[int]:
    """The roles whose tensors are also found elsewhere in the state that a call can reach: its likes must have the same ones.
    Raises Unlike where its modules are found there, or what is not compared item by item."""
    described = block.described
    own = {id(vars(m)[table]) for m in described.modules for table in TABLES}
    modules = {id(m) for m in described.modules}
    bound: set[int] = set()
    for place in block.state.places:
        if id(place.owner) in own or id(place.owner) in modules or is_given(place.owner, described.given):
            continue
        if place.owner is not None and place.before.keys() == {""}:
            raise Unlike
        for value in _flat((*place.before.keys(), *place.before.values())):
            if id(value) in modules or (type(value) is int and value in modules):
                raise Unlike
            if id(value) in described.places:
                bound.add(described.places[id(value)])
    return frozenset(bound)


def _flat(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (tuple, frozenset)):
            yield from _flat(value)
        else:
            yield value


def _reached(made: Sequence[Tensor], roles: Sequence[Tensor]) -> list[tuple[int, ...]]:
    """By made tensor, the roles that its gradient leads to. Raises Unlike where it leads elsewhere."""
    with torch._C.DisableTorchFunction():
        edges: dict[Any, int] = {}
        for i, role in enumerate(roles):
            if role.requires_grad:
                edges.setdefault(id(role) if role.grad_fn is None else (role.grad_fn, role.output_nr), i)
        found = []
        for tensor in made:
            stack: list[Any] = [(tensor.grad_fn, tensor.output_nr)] if tensor.grad_fn is not None else []
            if tensor.requires_grad and not stack:
                raise Unlike
            seen, reached = set(stack), set[int]()
            while stack:
                edge = stack.pop()
                variable = getattr(edge[0], "variable", None)
                number = edges.get(edge if variable is None else id(variable))
                if number is not None:
                    reached.add(number)
                elif variable is not None:
                    raise Unlike
                else:
                    following = {one for one in edge[0].next_functions if one[0] is not None} - seen
                    seen |= following
                    stack += following
            found.append(tuple(sorted(reached)))
        return found


def _last(graph: fx.Graph) -> fx.Node:
    return next(iter(reversed(graph.nodes)))


def _check_inside(begin: fx.Node, end: fx.Node) -> None:
    """Raises Unlike where the nodes of a block are not ones that its likes have too, or do not make its results."""
    results: list[fx.Node] = []
    fx.map_arg(end.args, results.append)
    inside, node = set[fx.Node](), begin.next
    while node is not end:
        inside.add(node)
        schema = getattr(node.target, "_schema", None)
        if node.op == "placeholder" or node.target in (functions.OP, gradient_if):
            raise Unlike
        if schema is not None and schema.is_mutable:
            raise Unlike
        if node.target is torch.ops.aten.batch_norm.default and node.args[5]:
            raise Unlike
        node = node.next
    if not inside.issuperset(results):
        raise Unlike
