"""One microbatch of hand-made stages: what F, B and W hold, keep and hand over, in bytes counted by hand.

A block is y = relu(x w) on 8 rows of 16 (T bytes each) with a square weight (W bytes), twice in a row: forward keeps x and y
of both, where the first y is the second x, so three values. Its backward makes g, dx and dw out of dy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from autopar.counter import ByteCounter
from autopar.ir import lines as ir
from autopar.ir.lines import Compute, Function, GatherKey, Line, ParameterGather, Ref, Stored
from autopar.ir.lowered import BoundaryEnd, LoweredStage, LoweredTemplate, Row, StoredParameter
from autopar.ir.mesh import Mesh
from autopar.ir.spec import Spec
from autopar.ir.steps import RuntimeStep
from autopar.ir.types import TensorType
from autopar.passes.memory.walk import ActionBytes, HandedGradient, action_bytes
from autopar.passes.played.tensors import Layout

F32 = torch.float32
ROWS, WEIGHT, SCALAR = TensorType((8, 16), F32), TensorType((16, 16), F32), TensorType((), F32)
WHOLE = Spec.replicated(2)
DENSE = Layout.dense(WEIGHT.shape, F32)
T, W = 8 * 16 * 4, 16 * 16 * 4
"""Bytes of x, of every value of its shape, and of a weight."""


def compute(out: str, op: str, **kwargs: object) -> Compute:
    return Compute(op, {k: Ref(v) if isinstance(v, str) else v for k, v in kwargs.items()}, outs=(out,))


GRADIENT = [
    compute("g", "aten.threshold_backward.default", grad_output="dy", self="y", threshold=0),
    compute("dx", "autopar.linear_dx", g="g", w="w"),
]
DW = compute("dw", "autopar.linear_dw", g="g", x="x")


def template(split: bool = False, saved: tuple[str, ...] = ("x", "y"), **how: tuple[int, ...] | str) -> LoweredTemplate:
    """The block. split: its weight's gradient is made by an action of its own."""
    forward = [compute("h", "autopar.linear", x="x", w="w"), compute("y", "aten.relu.default", self="h")]
    backward = [*GRADIENT] if split else [*GRADIENT, DW]
    return LoweredTemplate(
        name="block",
        planned_as="block",
        forward=Function("block_forward", ("w", "x"), tuple(forward), ("y",)),
        backward=Function("block_backward", ("w", "dy"), tuple(backward), ("dx",) if split else ("dx", "dw")),
        saved=saved,
        random=False,
        outputs=(WHOLE,),
        input_grads=(WHOLE,),
        param_grads=(WHOLE,),
        late_params=(0,),
        weights=Function("block_weights", ("g", "x"), (DW,), ("dw",)) if split else None,
        later=("g", "x") if split else (),
        **how,  # type: ignore[arg-type]
    )


def typed(out: str, type_: TensorType, rank: int = 2) -> dict[str, tuple[object, ...]]:
    return {"outs": (out,), "types": (type_,), "specs": (Spec.replicated(rank),)}


def stage(
    forward: Function,
    backward: Function | None = None,
    weights: Function | None = None,
    block: LoweredTemplate | None = None,
    mesh: Mesh | None = None,
    spec: Spec = WHOLE,
    first: bool = False,
    **parameters: StoredParameter,
) -> LoweredStage:
    """A stage that receives x and sends y; first: x is the batch and nothing goes back."""
    end = (BoundaryEnd("x", 0, ROWS, spec),)
    rows = (Row(0, "x", ROWS, spec, 0),)
    return LoweredStage(
        index=0,
        mesh=mesh or Mesh.of(),
        templates={"block": block or template()},
        forward=forward,
        backward=backward,
        weights=weights,
        prepare=(),
        parameters=parameters or {name: parameter(name) for name in ("w0", "w1")},
        buffers={},
        inputs=rows if first else (),
        outputs=(),
        received=() if first else end,
        sent=(BoundaryEnd("y", 1, ROWS, spec),),
        gradients_received=(BoundaryEnd("dy", 1, ROWS, spec),),
        gradients_sent=() if first else end,
        training=backward is not None,
        microbatches=1,
    )


def parameter(name: str, spec: Spec = WHOLE) -> StoredParameter:
    return StoredParameter(name, WEIGHT, spec, spec, True, (), 1, ())


def function(
    name: str, args: Sequence[str], lines: Sequence[Line], returns: Sequence[str], spec: Spec = WHOLE
) -> Function:
    """Arguments are of x's type, but lists."""
    return Function(name, tuple(args), tuple(lines), tuple(returns), dict.fromkeys(args, (ROWS, spec)))


def forward_call(number: int, x: str, y: str) -> ir.CallForward:
    outs = (y, f"saved{number}")
    return ir.CallForward("block", number, (Stored(f"w{number}"),), (x,), keeps=True, outs=outs)


def backward_call(number: int, dy: str, *outs: str) -> ir.CallBackward:
    return ir.CallBackward("block", number, f"saved{number}", (Stored(f"w{number}"),), (dy,), outs=outs)


def two_blocks(spec: Spec = WHOLE, mesh: Mesh | None = None, first: bool = False) -> LoweredStage:
    forward = [forward_call(0, "x", "y0"), forward_call(1, "y0", "y1")]
    backward = [
        backward_call(1, "dy", "d1", "dw1"),
        ir.AddGradient("dw1", "w1", owned=True),
        backward_call(0, "d1", "d0", "dw0"),
        ir.AddGradient("dw0", "w0", owned=True),
    ]
    return stage(
        function("forward", ["x"], forward, ["y1", "saved0", "saved1"], spec),
        function("backward", ["saved0", "saved1", "dy"], backward, [] if first else ["d0"], spec),
        mesh=mesh,
        spec=spec,
        first=first,
    )


# --- a block twice


def test_forward_keeps_what_its_calls_saved() -> None:
    """x, y0 and y1, which leaves for the next stage but is saved too. The peak has what h is beside them."""
    f = action_bytes(two_blocks())["F"]
    assert (f.peak, f.end, f.received, f.sent, f.gradients) == (4 * T, 3 * T, T, 0, ())


def test_the_batch_costs_nothing() -> None:
    f = action_bytes(two_blocks(first=True))["F"]
    assert (f.peak, f.end, f.received) == (3 * T, 2 * T, 0)


def test_backward_frees_what_forward_kept() -> None:
    """d0 leaves; nothing of the microbatch stays."""
    b = action_bytes(two_blocks())["B"]
    assert (b.end, b.received, b.sent) == (0, T, T)


def test_a_gradient_of_the_input_that_is_not_sent_is_dropped() -> None:
    b = action_bytes(two_blocks(first=True))["B"]
    assert (b.end, b.received, b.sent) == (0, T, 0)


def test_gradients_are_handed_over_in_order_with_the_peaks_before_them() -> None:
    """At dw1 there are x, y0, dy (the stage holds it during the call), g, dx and dw; y1 went after g. At dw0 there are x, d1,
    g, dx and dw; y0 went after g. What stays without the first is x, y0 and d1, without the second d0."""
    b = action_bytes(two_blocks())["B"]
    assert b.gradients == (
        HandedGradient(5 * T + W, 3 * T, "w1", DENSE, True),
        HandedGradient(4 * T + W, T, "w0", DENSE, True),
    )
    assert (b.top, b.peak) == (T, 5 * T + W)


def test_the_blocks_of_two_ranks_hold_half_but_weights() -> None:
    actions = action_bytes(two_blocks(Spec((("dp",), ())), Mesh.of(dp=2)))
    f, b = actions["F"], actions["B"]
    assert (f.peak, f.end, f.received) == (2 * T, 3 * T // 2, T // 2)
    assert [(g.top, g.alive, g.layout.nbytes) for g in b.gradients] == [
        (5 * T // 2 + W, 3 * T // 2, W),
        (2 * T + W, T // 2, W),
    ]


def test_real_tensors_hold_the_same() -> None:
    """Both blocks as statements with their `del`s, under a counter."""
    counter, w = ByteCounter(), torch.ones(16, 16)
    gradients = []

    def block(x: torch.Tensor) -> torch.Tensor:
        h = torch.mm(x, w)
        return torch.relu(h)

    def backward(saved: list[torch.Tensor], dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = saved
        saved.clear()
        g = torch.ops.aten.threshold_backward(dy, y, 0)
        del y
        return torch.mm(g, w), torch.mm(g.t(), x)

    f = action_bytes(two_blocks())["F"]
    with counter:
        x = torch.ones(8, 16)
        y0 = block(x)
        y1 = block(y0)
        first, second = [x, y0], [y0, y1]
        del x, y0, y1
        assert (f.peak, f.end) == (counter.peak, counter.alive)
        d = torch.ones(8, 16)
        for saved in (second, first):
            counter.restart()
            dx, dw = backward(saved, d)
            top, d = counter.peak, dx
            del dx, dw
            gradients.append((top, counter.alive))
    assert [(g.top, g.alive) for g in action_bytes(two_blocks())["B"].gradients] == gradients


# --- weights apart


def split_blocks() -> LoweredStage:
    forward = [forward_call(0, "x", "y0"), forward_call(1, "y0", "y1")]
    backward = [backward_call(1, "dy", "d1", "later1"), backward_call(0, "d1", "d0", "later0")]
    weights: list[Line] = []
    for n in (1, 0):
        weights.append(ir.CallWeights("block", n, f"later{n}", outs=(f"dw{n}",)))
        weights.append(ir.AddGradient(f"dw{n}", f"w{n}", owned=True))
    return stage(
        function("forward", ["x"], forward, ["y1", "saved0", "saved1"]),
        function("backward", ["saved0", "saved1", "dy"], backward, ["d0", "later0", "later1"]),
        function("weights", ["later0", "later1"], weights, []),
        template(split=True),
    )


def test_backward_leaves_what_weights_read() -> None:
    """g and x of both blocks; at the last dx there are d1 and itself beside them."""
    b = action_bytes(split_blocks())["B"]
    assert (b.gradients, b.peak, b.end, b.sent) == ((), 6 * T, 4 * T, T)


def test_weights_free_what_backward_left_and_hand_over_every_gradient() -> None:
    w = action_bytes(split_blocks())["W"]
    assert w.gradients == (
        HandedGradient(4 * T + W, 2 * T, "w1", DENSE, True),
        HandedGradient(2 * T + W, 0, "w0", DENSE, True),
    )
    assert (w.end, w.received, w.sent) == (0, 0, 0)


def test_a_stage_without_backward_keeps_nothing() -> None:
    block = replace(template(), backward=None, saved=())
    call = ir.CallForward("block", 0, (Stored("w0"),), ("x",), outs=("y",))
    actions = action_bytes(stage(function("forward", ["x"], [call], ["y"]), block=block))
    assert actions.keys() == {"F"}
    assert (actions["F"].peak, actions["F"].end, actions["F"].sent) == (3 * T, 0, T)


def test_a_bias_goes_with_its_product() -> None:
    """linear and the addition of a vector run as one op: there is never an h beside the sum."""
    h = replace(compute("h", "autopar.linear", x="x", w="w"), types=(ROWS,), specs=(WHOLE,))
    y = replace(compute("y", "aten.add.Tensor", self="h", other="b"), types=(ROWS,), specs=(WHOLE,))
    vector = {"b": (TensorType((16,), F32), Spec.replicated(1))}
    block = replace(
        template(), forward=Function("block_forward", ("w", "b", "x"), (h, y), ("y",), vector), backward=None, saved=()
    )
    call = ir.CallForward("block", 0, (Stored("w0"), Stored("b0")), ("x",), outs=("y",))
    bias = StoredParameter("b0", *vector["b"], Spec.replicated(1), True, (), 1, ())
    one = stage(function("forward", ["x"], [call], ["y"]), block=block, w0=parameter("w0"), b0=bias)
    assert action_bytes(one)["F"].peak == 2 * T


# --- between calls


def forward_of(*lines: Line, mesh: Mesh | None = None, **parameters: StoredParameter) -> ActionBytes:
    """A forward of these lines, which make y of x."""
    return action_bytes(stage(function("forward", ["x"], lines, ["y"]), mesh=mesh, **parameters))["F"]


@pytest.mark.parametrize(
    ("dim", "tier", "peak"),
    [(0, "", 2 * T + W), (1, "", 2 * T + 2 * W), (0, "ddr", 2 * T + W + W // 2)],
    ids=["first dim", "joined at the end", "from a tier"],
)
def test_gathered_parameters_are_there_from_prefetch_on(dim: int, tier: str, peak: int) -> None:
    """x and r are alive; the gathered weight, its chunks where they must be joined, its shard where it rests elsewhere."""
    dims: list[tuple[str, ...]] = [(), ()]
    dims[dim] = ("dp",)
    gather = ParameterGather("w0", (RuntimeStep("all_gather", ("dp",), (dim,)),), None)
    f = forward_of(
        ir.Prefetch(GatherKey(0), (gather,)),
        compute("r", "aten.relu.default", self="x"),
        ir.TakeParameters(GatherKey(0), outs=("w0_0f",)),
        compute("y", "aten.add.Tensor", self="x", other="r"),
        mesh=Mesh.of(dp=2),
        w0=replace(parameter("w0", Spec(tuple(dims))), tier=tier),
    )
    assert (f.peak, f.end, f.sent) == (peak, 0, T)


def test_a_gathered_parameter_goes_after_its_last_use() -> None:
    """h is made beside x and the weight, four values beside h alone."""
    gather = ParameterGather("w0", (RuntimeStep("all_gather", ("dp",), (0,)),), None)
    f = forward_of(
        ir.Prefetch(GatherKey(0), (gather,)),
        ir.TakeParameters(GatherKey(0), outs=("w",)),
        compute("h", "autopar.linear", x="x", w="w"),
        *(compute(f"t{i}", "aten.neg.default", self="h") for i in range(4)),
        compute("y", "aten.cat.default", tensors=[Ref(f"t{i}") for i in range(4)]),
        mesh=Mesh.of(dp=2),
        w0=parameter("w0", Spec((("dp",), ()))),
    )
    assert (f.peak, f.sent) == (8 * T, 4 * T)


def test_a_buffer_costs_nothing_until_something_is_made_of_it() -> None:
    f = forward_of(
        ir.ReadBuffer("running", **typed("b", ROWS)),
        compute("y", "aten.add.Tensor", self="x", other="b"),
        ir.WriteBuffer("y", "running"),
    )
    assert (f.peak, f.end, f.sent) == (2 * T, 0, T)


def test_the_sum_of_the_loss_is_the_loss() -> None:
    f = forward_of(compute("loss", "aten.sum.default", self="x"), ir.SumLoss("loss", ("dp",), **typed("y", SCALAR, 0)))
    assert (f.peak, f.end, f.sent) == (T + 4, 0, 4)


@pytest.mark.parametrize("kind", [ir.SeedGradient, ir.ZeroGradient])
def test_a_gradient_that_begins_here_is_made_here(kind: type[ir.SeedGradient] | type[ir.ZeroGradient]) -> None:
    backward = [kind(**typed("dy", ROWS)), backward_call(0, "dy", "d0", "dw0"), ir.AddGradient("dw0", "w0")]
    forward = function("forward", ["x"], [forward_call(0, "x", "y0")], ["y0", "saved0"])
    b = action_bytes(stage(forward, function("backward", ["saved0"], backward, ["d0"])))["B"]
    assert (b.received, b.peak, b.gradients[0].owned) == (0, 4 * T + W, False)


def test_what_is_parked_leaves_the_device_and_comes_back() -> None:
    """y rests in ddr between the actions, x stays; backward has y again from the start."""
    park = ir.ParkSaved("saved0", (1,), "ddr", "block")
    backward = [
        ir.FetchSaved("saved0"),
        ir.AwaitSaved("saved0"),
        backward_call(0, "dy", "d0", "dw0"),
        ir.AddGradient("dw0", "w0"),
    ]
    actions = action_bytes(
        stage(
            function("forward", ["x"], [forward_call(0, "x", "y0"), park], ["y0", "saved0"]),
            function("backward", ["saved0", "dy"], backward, ["d0"]),
            block=template(offload=(1,), offload_tier="ddr"),
        )
    )
    f, b = actions["F"], actions["B"]
    assert (f.peak, f.end, f.sent, f.parked) == (3 * T, T, T, {"ddr": T})
    assert (b.peak, b.end, b.parked) == (4 * T + W, 0, {"ddr": 0})


def test_a_storage_that_is_saved_twice_is_parked_once() -> None:
    block = template(saved=("x", "y", "y"))
    lines = [forward_call(0, "x", "y0"), ir.ParkSaved("saved0", (1, 2), "ddr", "block")]
    f = action_bytes(stage(function("forward", ["x"], lines, ["y0", "saved0"]), block=block))["F"]
    assert (f.end, f.parked) == (T, {"ddr": T})


def test_a_line_of_an_unknown_kind_is_refused() -> None:
    with pytest.raises(TypeError, match="the memory of a Line is not known"):
        forward_of(Line(outs=("y",)))
