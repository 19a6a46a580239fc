"""Parameters that calls read stacked rest one after another: nothing is copied, and the promised peak says so."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.ops.grouped import stacked as stacked_op
from autopar.passes.lower.rooms import rooms
from autopar.runtime.kernels.grouped import stacked
from autopar.runtime.program.layout import TensorInfo
from autopar.runtime.step.stage import Rooms
from tests.capture.known import expert_forms as forms
from tests.measure import measure_peak

ADAMW = functools.partial(torch.optim.AdamW, lr=0.05, weight_decay=0.1)


class Penalized(nn.Module):
    """Two mixtures. Of the second the model itself stacks the last layers of two experts, too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(forms.WhereIndex(forms.SwiGlu) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        second: Any = self.layers[1]
        return x + stacked_op([second.experts[i].w2.weight for i in (1, 2)]).square().mean()


@functools.cache
def compiled() -> tuple[Penalized, autopar.ParallelProgram, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    model, x = Penalized(), torch.randn(2, 4, forms.D)
    options = autopar.Options(microbatches=1, recompute="none", on_overflow="chunk")
    cluster = autopar.ClusterSpec.local(1)
    return (
        model,
        autopar.compile(model, cluster, (x, x), loss_fn=F.mse_loss, optimizer=ADAMW, options=options),
        (x, x),
    )


def test_what_is_read_in_one_stack_alone_has_a_room() -> None:
    model, program, _ = compiled()
    found = rooms(program.ir)
    assert {n for n in found if "layers.0" in n} == {n for n, _ in model.named_parameters() if "layers.0.experts" in n}
    without = {f"layers.1.experts.{i}.w2.weight" for i in range(forms.EXPERTS)}
    assert {n for n in found if "layers.1" in n} == {
        n for n, _ in model.named_parameters() if "layers.1.experts" in n
    } - without
    assert found["layers.0.experts.3.w3.weight"] == found["layers.0.experts.0.w1.weight"]
    assert found["layers.0.experts.3.w2.weight"] != found["layers.0.experts.0.w1.weight"]


def test_rooms_are_where_parameters_lie_and_what_peaks_count() -> None:
    model, program, batch = compiled()

    def body(session: Any) -> dict[str, int]:
        return {name: p.untyped_storage().data_ptr() for name, p in session.stages[0].rt.params.items()}

    (memories,) = program.in_process.run(program.weights(), autopar.UpdateRule(ADAMW), 0, body)
    found = rooms(program.ir)
    assert {name: memories[name] == memories[found.get(name, name)] for name in memories} == dict.fromkeys(
        memories, True
    )
    assert len(set(memories.values())) == len(memories) - len(found) + len(set(found.values()))
    (measured,) = measure_peak(program, batch)
    assert 0.98 * measured <= program.predicted.peak_bytes <= 1.05 * measured
    assert autopar.verify(program, model, batch, steps=2).ok


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 2), (0, 2), (1, 0), (2, 2)])
def test_a_stack_is_a_view_of_what_lies_in_order(order: tuple[int, ...]) -> None:
    room = torch.randn(3, 4, 5)
    parts = [room[i] for i in order]
    y = stacked(parts)
    assert torch.equal(y, torch.stack(parts))
    assert (y.untyped_storage().data_ptr() == room.untyped_storage().data_ptr()) == (order in ((0, 1, 2), (1, 2)))


def test_parts_that_are_turned_are_copied() -> None:
    room = torch.randn(2, 4, 4)
    parts = [room[i].t() for i in range(2)]
    assert torch.equal(stacked(parts), torch.stack(parts))


def test_a_room_holds_its_tensors_in_the_order_of_the_table() -> None:
    row = {"shape": (4,), "dtype": "float32", "spec": ((),)}
    infos = [TensorInfo(name, row | {"room": room}) for name, room in (("a", "a"), ("b", ""), ("c", "a"))]
    memory = Rooms(infos)
    c, b, a = (memory.empty(info, (4,), torch.float32, torch.device("cpu")) for info in reversed(infos))
    assert stacked([a, c]).data_ptr() == a.data_ptr() != stacked([c, a]).data_ptr()
    assert b.untyped_storage().data_ptr() != a.untyped_storage().data_ptr()
