"""`repeat_interleave` by constants has a shape that is known while the model is traced; by data it is refused at its line."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar

X = torch.randn(8, 4, 6, dtype=torch.float64)
SGD = functools.partial(torch.optim.SGD, lr=0.1)


class Net(nn.Module):
    def __init__(self, repeat: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.repeat = nn.Linear(6, 6, dtype=torch.float64), repeat
        self.counts = torch.tensor([1, 3, 0, 2])
        self.register_buffer("kept", torch.tensor([2, 2, 2, 2]))

    def forward(self, x: Tensor) -> Tensor:
        out = self.repeat(self, self.first(x))
        return (out * torch.arange(out.numel() // len(out), dtype=out.dtype).view(1, *out.shape[1:])).sin().mean()


CONSTANT: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "an int": lambda m, x: x.repeat_interleave(2, 1),
    "an int by name": lambda m, x: torch.repeat_interleave(input=x, repeats=3, dim=2),
    "a list as a tensor": lambda m, x: x.repeat_interleave(torch.tensor([1, 3, 0, 2]), 1),
    "of the channels": lambda m, x: torch.repeat_interleave(x, torch.tensor([1, 2, 3, 0, 1, 1]), dim=-1),
    "one entry": lambda m, x: x.repeat_interleave(torch.tensor([3]), dim=1),
    "no dim": lambda m, x: x.flatten(1)[:, :4].repeat_interleave(torch.tensor(2), 1),
    "computed": lambda m, x: x.repeat_interleave(torch.arange(4) + 1, 1),
    "a plain attribute": lambda m, x: x.repeat_interleave(m.counts, 1),
    "with its size": lambda m, x: x.repeat_interleave(m.kept, 1, output_size=8),
    "places alone": lambda m, x: x[:, torch.repeat_interleave(torch.tensor([1, 3, 0, 2]))],
    "flat": lambda m, x: x[:, 0].repeat_interleave(torch.full((48,), 2)).view(8, 12),
}
OPTIONS = ({"mesh": {"dp": 4}}, {"mesh": {"dp": 2, "tp": 2}}, {"mesh": {"dp": 2, "tp": 2}, "microbatches": 2})


@pytest.mark.few(3)
@pytest.mark.parametrize("kind", CONSTANT)
@pytest.mark.parametrize("options", OPTIONS, ids=["dp", "dp and tp", "microbatches"])
def test_repeats_that_are_constant_equal_eager(kind: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Net(CONSTANT[kind])
    if kind == "flat" and "microbatches" in options:
        options = {
            key: value for key, value in options.items() if key != "microbatches"
        }  # its repeats are of the whole batch
    program = autopar.compile(
        model, autopar.ClusterSpec.local(4), (X,), optimizer=SGD, options=autopar.Options(**options)
    )
    run = program.run([(X,)], steps=2)
    optimizer, losses = SGD(model.parameters()), []
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(X)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    torch.testing.assert_close(list(run.losses), losses, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(run.state_dict(), dict(model.state_dict()), rtol=1e-9, atol=1e-12)


DATA: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "a buffer": lambda m, x: x.repeat_interleave(m.kept, 1),
    "values": lambda m, x: torch.repeat_interleave(x, (x[0, :, 0] > 0).long() + 1, dim=1),
    "places": lambda m, x: x[:, torch.repeat_interleave((x[0, :, 0] > 0).long() + 1)],
}


@pytest.mark.parametrize("kind", DATA)
def test_repeats_that_data_decides_are_as_many_as_the_examples_or_refused_at_their_line(kind: str) -> None:
    model, ranks, refuse = Net(DATA[kind]), autopar.ClusterSpec.local(1), autopar.Options(branches="refuse")
    with pytest.raises(autopar.CaptureError, match=r"repeat_interleave.*pass output_size=") as refused:
        autopar.compile(model, ranks, (X,), optimizer=SGD, options=refuse)
    assert "test_repeats.py" in str(refused.value)
    program = autopar.compile(model, ranks, (X,), optimizer=SGD)
    assert autopar.verify(program, model, (X,), steps=1).ok
    if kind != "a buffer":
        with pytest.raises(autopar.GuardError, match=r"test_repeats\.py"):
            program.run([(-X.abs(),)])
