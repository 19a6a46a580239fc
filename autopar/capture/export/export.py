"""Capture: `torch.export` of model and loss under fake CPU tensors, as one flat graph of functional ATen training ops.

The semantic ops (linear, attention, norms, losses) stay whole. What cannot be captured fails with the user's source line
and the usual fix.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from autopar.capture.before.changed import check_changes, kept
from autopar.capture.before.state import State, state_of
from autopar.capture.before.two_steps import Steps
from autopar.capture.before.unsupported_state import check_inputs, check_model, check_written_buffers, shared_memory
from autopar.capture.examples.trees import flatten
from autopar.capture.explain import dynamic, dynamic_node, explain, first_line, quiet, user_frame
from autopar.capture.export.fake import exports, fake_like, faked
from autopar.capture.export.flat_step import FlatStep
from autopar.capture.export.functional import check_writes, functional, traced_step
from autopar.capture.export.named_constants import check_constants, named_by_content, same_constants
from autopar.capture.exported import Exported, Gives, Held
from autopar.capture.while_traced import functions
from autopar.capture.while_traced.clocks import noted_clocks, same_graph
from autopar.capture.while_traced.data_numbers import Answer
from autopar.capture.while_traced.decisions import Decisions, decisions_of
from autopar.errors import AutoparError, CaptureError


def _run_example(step: nn.Module, leaves: Sequence[torch.Tensor], decisions: Decisions) -> None:
    """The step on values, answers noted."""
    assert isinstance(step, FlatStep)
    step.owned, step.decisions = None, decisions
    with torch.compiler.set_stance("force_eager"), torch.enable_grad():
        step(*(leaf.detach().clone() for leaf in leaves))


def _trace_into(loss_fn: Any) -> None:
    """Let nodes say which line of the loss they come from: export keeps the frames of methods `forward` alone, and of
    functions that are named to it."""
    name_to_export = getattr(torch.fx.proxy, "_register_stack_trace_anchor", None)
    if name_to_export is not None and loss_fn is not None:
        name_to_export(loss_fn.func if isinstance(loss_fn, functools.partial) else loss_fn)


def export_once(
    model: nn.Module,
    inputs: Any,
    loss_fn: Any,
    targets: int,
    mode: FakeTensorMode,
    pieces: int,
    forced: tuple[Answer, ...] | None,
    to_train: bool,
    gives: Gives,
) -> Exported:
    """The step, traced one way, what it holds the data to among its outputs. pieces: what the loss is divided by; forced:
    branches on data go the example's way, but for these first ones (None: they are not to be answered); to_train: see
    `capture_program`. Raises CaptureError, InputError."""
    leaves, names, structure = flatten(inputs)
    check_inputs(leaves, names)
    check_model(model, loss_fn)
    fakes = [fake_like(t.detach(), mode) for t in leaves]
    step = FlatStep(model, loss_fn, structure, names, targets, pieces, to_train, gives)
    seen = step.seen
    step.training = model.training
    if forced is not None:
        step.decisions = decisions_of(step, leaves, lambda one, decisions: _run_example(one, leaves, decisions), forced)
    _trace_into(loss_fn)
    sharing = shared_memory(model)
    own_buffers = {name: b for name, b in step.named_buffers(remove_duplicate=False) if not b.is_meta}
    with faked(step, mode) as fake_names, kept(model, loss_fn) as state:
        tensors = _tensors(step)
        try:
            with (
                functions.recording() as without_gradient,
                quiet(),
                noted_clocks(state.functions) as clocks,
                exports(step, mode),
            ):
                traced, writes = traced_step(step, fakes, state.restore)
                exported = functional(traced, writes)
        except Exception as error:
            check_changes(seen.changes, state, lambda: step(*fakes), mode)
            if seen.training and not isinstance(error, AutoparError):
                _eager_grads(step, fakes, mode, fake_names)  # where eager fails too, its reason is the better one
            raise explain(error, model) from error
        buffers = {key: own_buffers[name] for key, name in fake_names.items() if name in own_buffers}
        alike = functools.partial(_traces_alike, traced, step, fakes, mode, tensors)
        steps = _steps(alike, step, fakes, mode, state, buffers)
        check_changes(seen.changes, state, lambda: step(*fakes), mode, steps)
        _check_dynamic(exported.graph, step, fakes, mode)
        if clocks:
            _check_clocks(alike, state, clocks)
        by_name = dict(step.named_parameters(remove_duplicate=False))
        first = {name: fake_names[id(p)] for name, p in by_name.items()}
        every_buffer = step.named_buffers(remove_duplicate=False)
        first_buffers = {
            name: fake_names[id(b)] for name, b in every_buffer if id(b) in fake_names
        }  # others are made by a step
        eager = frozenset(first[n] for n in seen.reached)
        if seen.training and not eager:
            raise _nothing_to_train(without_gradient)
        if seen.training and (writes or any(n.target is functions.OP for n in exported.graph.nodes)):
            state.restore()
            eager = _eager_grads(step, fakes, mode, fake_names)
    signature = exported.graph_signature
    outputs = exported.graph.output_node().args[0]
    check_writes(exported, names)
    kinds = _kinds(signature, first | first_buffers)
    ends = [(spec.kind.name, spec.target, n.name) for spec, n in zip(signature.output_specs, outputs, strict=True)]
    updates = {_strip(buffer): name for kind, buffer, name in ends if kind == "BUFFER_MUTATION"}
    check_written_buffers(sharing, updates)
    users = tuple(name for kind, _, name in ends if kind == "USER_OUTPUT")
    last = len(users) - len(seen.conditions)
    users, conditions = users[:last], users[last:]
    constants = {
        _strip(k): v
        for k, v in exported.constants.items()  # buffers that are not persistent among them
        if isinstance(v, torch.Tensor) and first_buffers.get(k, k) == k
    }
    check_constants(
        {name: constants[name] for kind, name in kinds.values() if kind == "constant" and name in constants}
    )
    kinds, constants = named_by_content(kinds, constants)
    if isinstance(loss_fn, nn.Module):
        frozen = dict(loss_fn.named_parameters("loss_fn"))
        constants |= {name: t.detach() for name, t in (*frozen.items(), *loss_fn.named_buffers("loss_fn"))}
        kinds = {node: ("buffer", what) if what in frozen else (kind, what) for node, (kind, what) in kinds.items()}
    return Exported(
        exported.graph,
        kinds,
        updates,
        users,
        seen.structure,
        structure,
        tuple(names),
        seen.training,
        constants,
        frozenset(_strip(n) for n in eager),
        {_strip(k): _strip(v) for k, v in first.items()},
        tuple(n.name for n in outputs),
        no_loss=seen.no_loss,
        extras=seen.extras,
        loss_path=seen.loss_path,
        selects=seen.selects,
        answers=() if step.decisions is None else tuple(value for _, value in step.decisions.answers),
        held=tuple(Held(name, *condition) for name, condition in zip(conditions, seen.conditions, strict=True)),
    )


def _nothing_to_train(checkpoints: Sequence[str]) -> CaptureError:
    """checkpoints: lines of reentrant ones that no gradient passes."""
    if checkpoints:
        return CaptureError(
            "the loss does not depend on any parameter that requires a gradient: no input of the reentrant checkpoint at "
            f"{checkpoints[0]} needs a gradient, so that nothing inside gets one, as in eager; write "
            "checkpoint(…, use_reentrant=False)"
        )
    return CaptureError("the loss does not depend on any parameter that requires a gradient; nothing to train")


def _check_dynamic(graph: fx.Graph, step: FlatStep, fakes: list[torch.Tensor], mode: FakeTensorMode) -> None:
    node = dynamic_node(graph)
    if node is None:
        return
    try:
        with mode:
            step(*fakes)  # stops at the user's line, which the graph does not know
    except Exception as error:
        raise explain(error, step.model) from error
    raise dynamic(node.target, step.model)


def _tensors(step: FlatStep) -> dict[str, torch.Tensor]:
    """The parameters and buffers of a step by all of their names."""
    return {**dict(step.named_parameters(remove_duplicate=False)), **dict(step.named_buffers(remove_duplicate=False))}


def _traces_alike(
    traced: Any, step: FlatStep, fakes: list[torch.Tensor], mode: FakeTensorMode, tensors: dict[str, torch.Tensor]
) -> bool:
    """Whether the step traced once more is the same. Traces that write may differ in what nobody reads, such as a layer that
    the first step alone makes: they are compared as graphs that write nothing. tensors: of the step as it was traced; graphs
    know them by their names, under which other ones may be by now."""
    now = _tensors(step)
    if now.keys() != tensors.keys() or any(now[name] is not tensor for name, tensor in tensors.items()):
        return False
    with functions.recording(), quiet(), exports(step, mode):
        again, _ = traced_step(step, fakes)
        if same_graph(traced.graph, again.graph):
            return same_constants(traced.constants, again.constants)
        if any(isinstance(t, FakeTensor) for name, t in again.constants.items() if name not in tensors):
            return False  # left by an earlier trace, in which alone it means something
        alike = same_graph(functional(traced, True).graph, functional(again, True).graph)
        return alike and same_constants(traced.constants, again.constants)


def _check_clocks(alike: Callable[[], bool], state: State, clocks: Sequence[str]) -> None:
    """A model that reads clocks is traced again: both traces must compute the same."""
    state.restore()
    if not alike():
        raise CaptureError(
            f"forward computes with a clock or with random bytes of the system ({', '.join(clocks)}), which would be a constant "
            "of the program; pass the value as an input, or draw with torch"
        )


def _steps(
    alike: Callable[[], bool],
    step: FlatStep,
    fakes: list[torch.Tensor],
    mode: FakeTensorMode,
    state: State,
    buffers: dict[int, torch.Tensor],
) -> Steps:
    """Two steps in a row, beside the trace of the first."""
    seen = step.seen

    def run() -> Any:
        with torch.compiler.set_stance("force_eager"), functions.recording(), quiet(), mode, torch.enable_grad():
            return step(*fakes), seen.training, str(seen.structure), str(seen.conditions)

    now = functools.partial(state_of, step.model, step.loss_fn)
    return Steps(run, lambda: seen.changes, alike, state, now, buffers)


def _strip(name: str) -> str:
    return name.removeprefix("model.")


def _kinds(signature: Any, first: dict[str, str]) -> dict[str, tuple[str, Any]]:
    """The kind of each placeholder, by its name. first: by name of a parameter or buffer the first name of the same tensor."""
    kinds: dict[str, tuple[str, Any]] = {}
    index = 0
    for spec in signature.input_specs:
        kind = spec.kind.name
        if kind == "PARAMETER":
            kinds[spec.arg.name] = ("param", _strip(first[spec.target]))
        elif kind == "BUFFER":
            kinds[spec.arg.name] = ("buffer", _strip(first.get(spec.target, spec.target)))
        elif kind == "CONSTANT_TENSOR":
            kinds[spec.arg.name] = ("constant", _strip(spec.target))
        else:
            kinds[spec.arg.name] = ("input", index)
            index += 1
    return kinds


def _eager_grads(
    step: nn.Module, fakes: list[torch.Tensor], mode: FakeTensorMode, names: dict[int, str]
) -> frozenset[str]:
    """Names of the parameters that get a gradient when the model runs eagerly (under fake tensors)."""
    parameters = [p for p in step.parameters() if p.requires_grad]
    try:
        with mode, torch.enable_grad():
            loss, *_ = step(*fakes)
            if loss.requires_grad:
                loss.backward()
    except Exception as error:
        where = user_frame(error)
        raise CaptureError(
            f"the model itself cannot be trained{f' ({where})' if where else ''}: {first_line(str(error))}"
        ) from error
    return frozenset(names[id(p)] for p in parameters if p.grad is not None)
