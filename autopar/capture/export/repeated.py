"""Calls that were not traced because they are like one that was (`autopar.capture.while_traced.alike`) get its nodes."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx
from torch.export.graph_signature import InputKind, InputSpec, TensorArgument

from autopar.capture.while_traced.alike import Repeated, Repeats, moved
from autopar.capture.while_traced.repeat_ops import BEGIN, END, PARAMETER, REPEAT
from autopar.capture.while_traced.set_aside import SetAside


def with_repeats(exported: Any, repeats: Repeats, writes: bool) -> bool:
    """Put the nodes of traced calls where their likes are, in place; False where a traced call is not in the graph as a
    whole, so that the step is to be traced in full. writes: whether the step writes to tensors, so that what lies in which
    memory counts."""
    graph: fx.Graph = exported.graph_module.graph
    inputs = _with_parameters(exported, repeats.aside)
    begins: dict[int, fx.Node] = {}
    blocks: dict[int, _Nodes] = {}
    for node in list(graph.nodes):
        if node.target is BEGIN:
            begins[node.args[0]] = node
        elif node.target is END:
            number = node.args[0]
            if number not in begins:
                return False
            blocks[number] = _Nodes(begins[number], node)
        elif node.target is REPEAT:
            call = repeats.repeated[node.args[0]]
            block = blocks.get(call.like.number)
            if block is None or (writes and not block.has_memory):
                return False
            given = iter(node.args[1])
            block.put(graph, node, [next(given) if name is None else inputs[name] for name in call.aside], call, writes)
    for node in [n for n in graph.nodes if n.target in (BEGIN, END)]:
        graph.erase_node(node)
    outputs: Any = graph.output_node().args[0]
    for spec, node in zip(exported.graph_signature.output_specs, outputs, strict=True):
        if isinstance(spec.arg, TensorArgument):
            spec.arg = TensorArgument(node.name)
    if writes and blocks:
        exported.graph_module.recompile()
    return True


def _with_parameters(exported: Any, aside: SetAside) -> dict[str, fx.Node]:
    """Parameters that were set aside become inputs of an exported step, in the order of the model's parameters. Returns them,
    by name."""
    if not aside.tensors:
        return {}
    graph: fx.Graph = exported.graph_module.graph
    signature = exported.graph_signature
    before = {spec.target: spec for spec in signature.input_specs if spec.kind is InputKind.PARAMETER}
    others = [spec for spec in signature.input_specs if spec.kind is not InputKind.PARAMETER]
    inputs: dict[str, fx.Node] = {}
    place = next(iter(graph.nodes))
    specs, state = [], {}
    for name in aside.order:
        if name in before:
            specs.append(before[name])
            state[name] = exported.state_dict[name]
            place = place.next
            continue
        with graph.inserting_before(place):
            node = inputs[name] = graph.placeholder(f"p_{name.replace('.', '_')}")
        node.meta["val"] = state[name] = aside.tensors[name]
        specs.append(InputSpec(InputKind.PARAMETER, TensorArgument(node.name), name))
    for node in [n for n in graph.nodes if n.target is PARAMETER]:
        node.replace_all_uses_with(inputs[node.args[0]])
        graph.erase_node(node)
    signature.input_specs[:] = [*specs, *others]
    rest = {name: value for name, value in exported.state_dict.items() if name not in state}
    exported.state_dict.clear()
    exported.state_dict.update(state | rest)
    return inputs


class _Nodes:
    """The nodes of a traced call, between two marks."""

    def __init__(self, begin: fx.Node, end: fx.Node) -> None:
        self.roles: Any = begin.args[1]
        self.results: Any = end.args[1]
        self.depth = len(begin.meta["nn_module_stack"])
        self.nodes: list[fx.Node] = []
        node = begin.next
        while node is not end:
            if node.target not in (BEGIN, END):
                self.nodes.append(node)
            node = node.next

    @property
    def has_memory(self) -> bool:
        """Whether `_Memory` can tell where values lie: those in one memory are of one dtype."""
        dtypes: dict[int, torch.dtype] = {}
        values = [value for node in (*self.roles, *self.nodes) for value in _tensors(node.meta.get("val"))]
        return all(dtypes.setdefault(_memory(value), value.dtype) == value.dtype for value in values)

    def put(self, graph: fx.Graph, node: fx.Node, roles: list[fx.Node], call: Repeated, writes: bool) -> None:
        """Copies of the nodes in the place of one that stands for a call which is like theirs. roles: of the call."""
        memory = _Memory(self.roles, roles) if writes else None
        env: dict[fx.Node, fx.Node] = dict(zip(self.roles, roles, strict=True))
        outer = node.meta["nn_module_stack"]
        stacks: dict[int, Any] = {}
        with graph.inserting_before(node):
            for one in self.nodes:
                new = env[one] = graph.node_copy(one, lambda n: env.get(n, n))
                if memory is not None and "val" in one.meta:
                    new.meta["val"] = memory.placed(one.meta["val"])
                stack = one.meta["nn_module_stack"]
                if id(stack) not in stacks:
                    inner = list(stack.items())[self.depth :]
                    stacks[id(stack)] = {**outer, **dict(_named(key, value, call) for key, value in inner)}
                new.meta["nn_module_stack"] = stacks[id(stack)]
        for user in list(node.users):
            assert user.target is operator.getitem
            user.replace_all_uses_with(env[self.results[user.args[1]]])
            graph.erase_node(user)
        graph.erase_node(node)


class _Memory:
    """The values of a call that is like another one: where those of the one share memory, so do those of the other."""

    def __init__(self, roles: Any, of_call: Any) -> None:
        self.bases: dict[int, Tensor] = {
            _memory(one.meta["val"]): other.meta["val"] for one, other in zip(roles, of_call, strict=True)
        }

    def placed(self, value: Any) -> Any:
        """A value of the call for one of the other."""
        if isinstance(value, (list, tuple)):
            return type(value)(self.placed(one) for one in value)
        if not isinstance(value, Tensor):
            return value
        with value.fake_mode, torch.no_grad():  # type: ignore[attr-defined]
            if _memory(value) not in self.bases:
                elements = value.untyped_storage().nbytes() // value.element_size()
                self.bases[_memory(value)] = torch.empty(elements, dtype=value.dtype)
            return self.bases[_memory(value)].as_strided(value.shape, value.stride(), value.storage_offset())


def _memory(value: Tensor) -> int:
    return value.untyped_storage()._cdata


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, (list, tuple)):
        return [tensor for one in value for tensor in _tensors(one)]
    return [value] if isinstance(value, Tensor) else []


def _named(key: str, value: tuple[str, str], call: Repeated) -> tuple[str, tuple[str, str]]:
    """The entry of a module's stack for a module of another call."""
    path, cls = value
    name, _, times = key.partition("@")
    root = call.path.removesuffix(_below_root(call.path))
    own = moved(root + path, call.like.path, call.path)
    count = int(times or 0) - call.like.started.get(root + path, 0) + call.started.get(own, 0)
    new = own.removeprefix(root)
    name = name.removesuffix(path) + new
    return (f"{name}@{count}" if count else name), (new, cls)


def _below_root(path: str) -> str:
    """The path of a module as the exported graph has it."""
    return path.removeprefix("_export_root").removeprefix(".")
