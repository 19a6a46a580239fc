"""The bytes of recurrent layers at their own sizes, from runs at small ones, are those of runs at their own sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.ir.lines import Compute, Ref
from autopar.passes.memory import probe, recurrent
from autopar.passes.memory.recurrent import Run
from autopar.passes.played.tensors import Effect, Layout, watch
from autopar.passes.rules.memo import Memo
from autopar.runtime.kernels import rnn

F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64
PAGES = 10 * 4096
"""The ten parts of a workspace of oneDNN are rounded up to whole pages."""
GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}


def layer(
    mode: str, sizes: tuple[int, int, int, int], dtype: torch.dtype, grad: bool, projected: int = 0, bias: bool = True
) -> tuple[Compute, tuple[Layout, ...], Run]:
    """A layer's line, the layouts of its operands and what runs it. sizes: of time, batch, input and hidden."""
    time, batch, width, hidden = sizes
    gates, output = GATES[mode] * hidden, projected or hidden
    shapes: dict[str, tuple[int, ...] | None] = {"x": (time, batch, width), "h0": (batch, output)}
    shapes |= {"c0": (batch, hidden) if mode == "lstm" else None, "w_ih": (gates, width), "w_hh": (gates, output)}
    shapes |= dict.fromkeys(("b_ih", "b_hh"), (gates,) if bias else None) | {
        "w_hr": (output, hidden) if projected else None
    }
    if grad:
        shapes |= {"g_out": (time, batch, output), "g_h": (batch, output)}
        shapes["g_c"] = (batch, hidden if mode == "lstm" else output)
    given = [name for name, shape in shapes.items() if shape is not None]
    refs = {name: Ref(f"v{given.index(name)}") if name in given else None for name in shapes}
    layouts = tuple(Layout.dense(shape, dtype) for shape in shapes.values() if shape is not None)
    function: Callable[..., Any] = rnn.rnn_grad if grad else rnn.rnn

    def run(tensors: list[torch.Tensor]) -> Any:
        own = dict(zip(given, tensors, strict=True))
        return function(mode, *(own.get(name) for name in shapes))

    return Compute(f"autopar.rnn{'_grad' if grad else ''}", {"mode": mode, **refs}), layouts, run


def assert_as_run(effect: Effect, layouts: tuple[Layout, ...], run: Run, pages: bool) -> None:
    measured = watch(run, layouts, "cpu")
    assert effect.fresh == measured.fresh
    assert effect.outs == measured.outs
    steps = next(layout.shape[0] for layout in layouts if len(layout.shape) == 3)
    of_a_step = measured.peak // steps if steps > max(recurrent._STEPS) else 0
    assert abs(effect.peak - measured.peak) <= PAGES * pages + of_a_step, (effect.peak, measured.peak)


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("dtype", [F32, BF16, F64], ids=str)
@pytest.mark.parametrize(
    ("mode", "sizes", "projected", "bias"),
    [
        ("lstm", (9, 12, 20, 48), 0, True),
        ("lstm", (4, 1, 100, 16), 0, False),
        ("lstm", (12, 4, 24, 40), 8, True),
        ("gru", (70, 3, 8, 40), 0, True),
        ("gru", (16, 32, 64, 24), 0, False),
        ("rnn_tanh", (68, 5, 30, 7), 0, True),
        ("rnn_relu", (10, 5, 6, 30), 0, True),
    ],
    ids=str,
)
def test_bytes_of_a_layer_are_those_of_a_run_at_its_sizes(
    mode: str,
    sizes: tuple[int, int, int, int],
    projected: int,
    bias: bool,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recurrent, "SMALL", 0)
    for grad in (False, True):
        line, layouts, run = layer(mode, sizes, dtype, grad, projected, bias)
        effect = recurrent.recurrent(line, layouts, run, Memo())
        assert_as_run(effect, layouts, run, grad and mode == "lstm" and dtype != F64 and not projected)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize(
    ("mode", "sizes"),
    [
        ("lstm", (20, 48, 512, 256)),
        ("lstm", (20, 48, 64, 1024)),
        ("lstm", (20, 40, 1500, 1000)),
        ("lstm", (24, 160, 300, 1100)),
        ("gru", (100, 32, 128, 512)),
    ],
    ids=str,
)
def test_bytes_of_a_wide_layer_are_those_of_a_run_at_its_sizes(
    mode: str, sizes: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    line, layouts, run = layer(mode, sizes, dtype, True)
    assert_as_run(recurrent.recurrent(line, layouts, run, Memo()), layouts, run, mode == "lstm")


def test_no_run_of_a_wide_layer_is_at_its_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    largest: list[int] = []
    real = recurrent.watch

    def watched(run: Run, layouts: tuple[Layout, ...], *rest: Any) -> Effect:
        largest.append(max(layout.nbytes for layout in layouts))
        return real(run, layouts, *rest)

    monkeypatch.setattr(recurrent, "watch", watched)
    memo = Memo()
    for mode, hidden in (("gru", 2048), ("gru", 4096)):
        line, layouts, run = layer(mode, (500, 64, hidden, hidden), F32, True)
        recurrent.recurrent(line, layouts, run, memo)
    assert len(largest) == 4, "layers of a kind share their runs"
    assert max(largest) < 1 << 20


@pytest.mark.parametrize(
    "module",
    [
        lambda: nn.GRU(12, 20, 2, bidirectional=True, batch_first=True),
        lambda: nn.LSTM(12, 20, 2, bidirectional=True),
        lambda: nn.LSTM(12, 20, proj_size=8, batch_first=True, bias=False),
    ],
    ids=["gru", "lstm", "projected"],
)
@pytest.mark.filterwarnings("ignore:LSTM with projections")
def test_every_line_of_a_model_is_measured_as_it_runs(
    module: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recurrent, "SMALL", 0)
    asked: list[str] = []

    def compared(line: Compute, layouts: tuple[Layout, ...], run: Run, memo: Memo) -> Effect:
        effect = recurrent.recurrent(line, layouts, run, memo)
        assert_as_run(effect, layouts, run, line.kwargs["mode"] == "lstm")
        asked.append(line.op)
        return effect

    monkeypatch.setattr(probe, "recurrent", compared)
    given = module()
    x = torch.randn(6, 6, 12)
    options = autopar.Options(mesh={"dp": 2})
    autopar.compile(
        given,
        autopar.ClusterSpec.local(2),
        (x,),
        loss_fn=lambda out: out[0].square().mean(),
        optimizer=torch.optim.SGD,
        options=options,
    )
    assert {*asked} == {"autopar.rnn", "autopar.rnn_grad"}
