"""On a GPU: steps that are captured as a CUDA graph against the same steps as they are written, in numbers and seconds."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from autopar.proof.casts import DividedAs
from autopar.runtime.step.cuda_graphs import CudaCapture
from autopar.runtime.step.session import Session
from benchmarks.harness import take_turns
from benchmarks.one_rank import MODELS
from tests.gpu.one_gpu import Beside, beside

pytestmark = pytest.mark.gpu
STEPS = 8


def captured(both: Beside, dtype: torch.dtype | None = None) -> Session:
    session = both.session(dtype)
    session.capture_steps(partial(CudaCapture, session.comm.device))
    return session


@pytest.mark.filterwarnings("error::autopar.runtime.step.cuda_graphs.CudaGraphWarning")
@pytest.mark.parametrize("name", MODELS)
def test_played_steps_are_those_of_the_text_in_float64(name: str) -> None:
    both = beside(name)
    text, played = both.session(torch.float64), captured(both, torch.float64)
    with DividedAs(torch.float64):
        for step in range(STEPS):
            losses = [session.train_step(both.batch(step, torch.float64)).item() for session in (text, played)]
            assert losses[1] == pytest.approx(losses[0], rel=1e-9)
    for parameter, value in text.rt.params.items():
        moved = (played.rt.params[parameter] - value).abs().max()
        assert float(moved) <= 1e-9 * float(value.abs().max())


@pytest.mark.filterwarnings("error::autopar.runtime.step.cuda_graphs.CudaGraphWarning")
@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("name", MODELS)
def test_played_steps_take_no_longer(name: str, precision: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    both = beside(name, precision)
    sessions = {"text": both.session(), "graph": captured(both)}
    programs = {what: lambda batch, s=session: float(s.train_step(batch)) for what, session in sessions.items()}
    turns = take_turns(programs, both.batch, steps=20, warmup=5, barrier=torch.cuda.synchronize)
    with capsys.disabled():
        print(f"\n{name}, {precision or 'float32'}: {turns.summary()['median_ms']}")
    assert turns.ratios("graph", "text")["ratio_of_medians"] < 1.05
