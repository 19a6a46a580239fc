"""Mixed precision in the captured program: which op computes in what, and where casts are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.capture.build import capture_program
from autopar.capture.graph.precision import cast_again
from autopar.ir.program import Program, op_name, operand_nodes, resolve
from autopar.ir.types import TensorType
from autopar.passes.rules.hubs import flow, phase_is_late
from tests.zoo.models import MODELS, ZooModel

BF16, FP16, F32 = torch.bfloat16, torch.float16, torch.float32
CAST = "aten._to_copy.default"


def captured(model: nn.Module, *inputs: Any, loss: Any = None, precision: str | None = "bf16") -> Program:
    """A model as a program; with a loss the last input is its target."""
    return capture_program(model, inputs, loss, 0 if loss is None else 1, precision=precision)[0]


def summed(y: Tensor, t: Tensor) -> Tensor:
    return F.mse_loss(y, t)


def computed(program: Program) -> dict[str, set[torch.dtype]]:
    """Op name -> dtypes of its floating operands."""
    found: dict[str, set[torch.dtype]] = {}
    for template in program.templates.values():
        for node in template.ops:
            types = [n.meta["type"] for n in operand_nodes(node)]
            found.setdefault(op_name(node.target), set()).update(t.dtype for t in types if t.is_float)
    return found


def slots(program: Program) -> dict[str, set[torch.dtype]]:
    """Parameter -> dtypes in which calls get it."""
    found: dict[str, set[torch.dtype]] = {}
    for call in program.calls:
        template = program.template_of(call)
        for slot, name in enumerate(call.params):
            found.setdefault(name, set()).add(template.type_of(template.params[slot]).dtype)
    return found


class Block(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(16, 32)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def token_loss(y: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(y.flatten(0, 1), t.flatten())


def net(precision: str | None = "bf16", blocks: int = 3) -> Program:
    ids = torch.zeros(4, 8, dtype=torch.long)
    return captured(Net(blocks), ids, ids, loss=token_loss, precision=precision)


# --- what computes in what


def test_products_and_activations_are_low_norms_and_losses_are_not() -> None:
    ops = computed(net())
    for op in (
        "autopar.linear",
        "autopar.linear_dx",
        "autopar.linear_dw",
        "autopar.embedding",
        "autopar.embedding_grad",
        "aten.gelu.default",
        "aten.gelu_backward.default",
    ):
        assert ops[op] == {BF16}, op
    for op in ("autopar.layer_norm", "autopar.layer_norm_backward", "autopar.cross_entropy_grad"):
        assert ops[op] == {F32}, op


def test_the_residual_stream_and_what_crosses_calls_is_low() -> None:
    program = net()
    crossing = {ref for call in program.calls for ref in call.inputs if ref.kind == "call"}
    kinds = {program.type_of(ref).dtype for ref in crossing if len(program.type_of(ref).shape) == 3}
    assert kinds == {BF16}
    assert program.type_of(program.outputs[0]).dtype == F32


def test_weights_come_low_and_norms_as_they_are() -> None:
    for name, dtypes in slots(net()).items():
        assert dtypes == ({F32} if "norm" in name else {BF16}), name
    assert {p.type.dtype for p in net().parameters.values()} == {F32}


def test_without_precision_nothing_is_cast() -> None:
    assert {d for dtypes in computed(net(None)).values() for d in dtypes} == {F32}
    assert net(None).fingerprint != net().fingerprint


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_softmax_by_hand_is_computed_in_float32_between_low_products(precision: str) -> None:
    class Attend(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            scores = (self.q(x) @ self.k(x).transpose(-1, -2)).masked_fill(mask, -1e9)
            return scores.softmax(-1) @ self.v(x)

    x, mask = torch.randn(2, 4, 8), torch.zeros(4, 4, dtype=torch.bool)
    program = captured(Attend(), x, mask, x, loss=summed, precision=precision)
    ops, low = computed(program), {"bf16": BF16, "fp16": FP16}[precision]
    assert ops["autopar.einsum"] == {low}
    assert ops["aten._softmax.default"] == ops["aten._softmax_backward_data.default"] == {F32}
    # 1e9 is no number of float16, so there the mask is put on in float32
    assert ops["aten.masked_fill.Scalar"] == {BF16 if precision == "bf16" else F32}


def test_batch_norm_keeps_its_statistics_in_float32() -> None:
    class Conv(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.conv(x)).relu().mean((2, 3))

    program = captured(Conv(), torch.randn(4, 3, 8, 8), torch.randn(4, 8), loss=summed)
    assert computed(program)["autopar.conv"] == {BF16}
    assert computed(program)["aten.relu.default"] == {BF16}
    assert {program.type_of(ref).dtype for name, ref in program.buffer_updates.items() if "running" in name} == {F32}
    assert slots(program)["norm.weight"] == {F32}


def test_inference_returns_the_dtype_of_the_model() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = self.a(x)
            return y, y.argmax(-1)

    program = captured(Two().eval(), torch.randn(4, 8))
    assert [program.type_of(ref).dtype for ref in program.outputs] == [F32, torch.int64]
    assert computed(program)["autopar.linear"] == {BF16}


def test_an_op_that_nobody_knows_computes_as_the_model_has_it() -> None:
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            assert x.dtype == F32
            return x.cumsum(-1)

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            assert g.dtype == F32
            return g.flip(-1).cumsum(-1).flip(-1)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(Square.apply(self.a(x)))

    program = captured(Model(), torch.randn(4, 8), torch.randn(4, 8), loss=summed)
    assert computed(program)["aten.cumsum.default"] == {F32}
    assert computed(program)["autopar.linear"] == {BF16}


# --- parameters


class Views(nn.Module):
    """A parameter through a view, one of a stack, one with a float32 use as well."""

    def __init__(self) -> None:
        super().__init__()
        self.turned, self.stack = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(2, 8, 8))
        self.both, self.shift = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.turned.t() @ self.stack[0] @ self.stack[1] @ self.both + self.shift
        return y.square().mean() + self.both.pow(2).sum()


def test_a_view_of_a_parameter_is_taken_of_its_low_form() -> None:
    found = slots(captured(Views(), torch.randn(4, 8)))
    assert found["turned"] == found["stack"] == found["shift"] == {BF16}


def test_a_parameter_used_in_both_ways_is_cast_where_it_is_used_low() -> None:
    program = captured(Views(), torch.randn(4, 8))
    assert F32 in slots(program)["both"]
    assert computed(program)["autopar.einsum"] == {BF16}
    assert computed(program)["aten.pow.Tensor_Scalar"] == {F32}


def test_a_tied_table_is_low_at_both_ends() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.embed(ids))

    ids = torch.zeros(2, 4, dtype=torch.long)
    assert set.union(*slots(captured(Tied(), ids, ids, loss=token_loss)).values()) == {BF16}


def test_a_model_in_16_bits_has_no_master_weights_to_keep() -> None:
    with pytest.raises(autopar.InputError, match=r"float32 master weights.*model\.float\(\)"):
        captured(nn.Sequential(nn.Linear(4, 4)).bfloat16(), torch.randn(2, 4).bfloat16())


# --- casts


@pytest.mark.few(1)
@pytest.mark.parametrize("zoo", MODELS, ids=str)
def test_blocks_that_were_equal_stay_one_template(zoo: ZooModel) -> None:
    targets = zoo.targets if isinstance(zoo.targets, int) and zoo.loss_fn is not None else 0
    plain, low = (
        capture_program(zoo.make(), zoo.batch(), zoo.loss_fn, targets, precision=p)[0] for p in (None, "bf16")
    )
    blocks, same = (
        [(c.template, c.params) for c in p.calls if c.path.split("@")[0][-1:].isdigit()] for p in (plain, low)
    )
    assert blocks == same
    assert len(low.calls) == len(plain.calls)


def test_a_value_is_cast_once_in_a_phase() -> None:
    for template in net().templates.values():
        casts = [(n.args[0], n.kwargs["dtype"], phase_is_late(n)) for n in template.ops if op_name(n.target) == CAST]
        assert len(casts) == len(set(casts))


def test_forward_never_keeps_a_widened_value_for_backward() -> None:
    """The operand of a norm or a loss is kept in 16 bits and widened again."""
    for template in net().templates.values():
        kept = flow(template).late
        assert not [n.name for n in template.ops if not phase_is_late(n) and n.name in kept and _widens(n)]


@pytest.mark.few(2)
@pytest.mark.parametrize("zoo", MODELS, ids=str)
def test_a_border_between_calls_never_parts_a_cast_from_its_op(zoo: ZooModel) -> None:
    """The operand of a norm or a loss crosses in 16 bits, and so does the result of a norm."""
    targets = zoo.targets if isinstance(zoo.targets, int) and zoo.loss_fn is not None else 0
    program = capture_program(zoo.make(), zoo.batch(), zoo.loss_fn, targets, precision="bf16")[0]
    for call in program.calls:
        for ref in call.inputs:
            if ref.kind == "call":
                owner = program.template_of(program.calls[ref.index])
                made = owner.nodes[owner.outputs[ref.output]]
                assert not _widens(made), (owner.name, made.name)
                assert op_name(resolve(made)[0].target) not in ("autopar.layer_norm", "autopar.rms_norm")


def _widens(node: torch.fx.Node) -> bool:
    if op_name(node.target) != CAST:
        return False
    before, after = operand_nodes(node)[0].meta["type"], node.meta["type"]
    return before.is_float and after.dtype.itemsize > before.dtype.itemsize


def test_a_value_that_backward_widens_again_is_there_before_all_who_read_it() -> None:
    """Readers are noted in any order: here the second one in the graph was the first to read the cast."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    wide = graph.call_function(torch.ops.aten._to_copy.default, (x,), {"dtype": F32})
    early = graph.call_function(torch.ops.aten.neg.default, (x,))
    late = graph.call_function(torch.ops.aten.neg.default, (wide,))
    early.args = (wide,)
    graph.output((early, late))
    for node, dtype, phase in ((x, BF16, "F"), (wide, F32, "F"), (early, F32, "W"), (late, F32, "W")):
        node.meta = {"type": TensorType((8,), dtype), "phase": phase}
    cast_again(graph)
    graph.lint()
    (again,) = (n for n in graph.nodes if n.op == "call_function" and n.meta["phase"] == "W" and n.kwargs)
    assert set(again.users) == {early, late}
    assert not wide.users
