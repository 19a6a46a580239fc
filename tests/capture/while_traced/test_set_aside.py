"""Parameters of later blocks that the step reads outside of a call are in its program as if they had never been set aside."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autopar.capture.build import capture_program
from autopar.capture.export import functional
from autopar.capture.while_traced.set_aside import SetAside
from autopar.ir.program import Program
from tests.capture.same_programs import assert_same_in_full

D = 4


class Block(nn.Module):
    def __init__(self, is_odd: bool = False) -> None:
        super().__init__()
        self.up, self.down, self.is_odd = nn.Linear(D, D), nn.Linear(D, D), is_odd

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x).tanh()
        return x + self.down(h.sin() if self.is_odd else h)


class Net(nn.Module):
    def __init__(self, f: Callable[[Net, Tensor], Tensor]) -> None:
        super().__init__()
        self.f = f
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.others = nn.ModuleList(Block(bool(i % 2)) for i in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.f(self, x)


def _penalty(net: Net, x: Tensor) -> Tensor:
    return x.sum() + sum(p.square().sum() for p in net.parameters())


def _first_without_gradient(net: Net, x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = net.blocks[2].up.weight.mean()
    return (x * scale).sum() + net.blocks[2].up.weight.sum()


def _unlike(net: Net, x: Tensor) -> Tensor:
    for block in net.others:
        x = block(x)
    return x.sum()


def _shapes_alone(net: Net, x: Tensor) -> Tensor:
    return x.sum() / sum(p.numel() for p in net.parameters())


def _mapped(net: Net, x: Tensor) -> Tensor:
    """A function that torch transforms reads one."""
    return torch.utils.checkpoint.checkpoint(lambda h: (h @ net.blocks[1].up.weight).sum(), x, use_reentrant=False)


@pytest.mark.parametrize("f", [_penalty, _first_without_gradient, _unlike, _shapes_alone, _mapped])
def test_a_parameter_that_is_read_is_in_the_program(f: Callable[[Net, Tensor], Tensor]) -> None:
    def captured() -> Program:
        torch.manual_seed(0)
        return capture_program(Net(f), (torch.randn(6, D),)).program

    assert_same_in_full(captured)


def test_where_one_is_lost_the_step_is_traced_in_full_and_its_state_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    traces: list[SetAside] = []

    def lose(self: SetAside, tracer: object, value: Tensor) -> None:
        traces.append(self)
        self.is_lost = True
        raise RuntimeError("lost")

    def once(net: Net, x: Tensor) -> Tensor:
        if not hasattr(net, "scale"):
            net.scale = 3.0
            return (x * net.blocks[1].up.weight.sum()).sum() * net.scale
        return (x * net.blocks[1].up.weight.sum()).sum() * 3.0

    monkeypatch.setattr(SetAside, "_node", lose)
    program = capture_program(Net(once), (torch.randn(6, D),)).program
    assert traces
    assert "blocks.1.up.weight" in program.trained


def test_export_sees_the_parameters_of_first_blocks_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[set[str]] = []
    export = torch.export.export

    def noted(step: nn.Module, *args: object, **kwargs: object) -> object:
        seen.append({name for name, _ in step.named_parameters()})
        return export(step, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(functional.torch.export, "export", noted)
    net = Net(lambda net, x: x.sum())
    names = [name for name, _ in net.named_parameters()]
    capture_program(net, (torch.randn(6, D),))
    assert {name for name in seen[0] if ".blocks." in name} == {
        f"model.blocks.0.{part}.{name}" for part in ("up", "down") for name in ("weight", "bias")
    }
    assert [name for name, _ in net.named_parameters()] == names
