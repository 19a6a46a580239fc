"""Calls that are alike are traced once, and the program is the one of a full trace; calls that are not are traced."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autopar.capture.build import capture_program
from autopar.capture.export import functional
from autopar.capture.while_traced.alike import Repeats
from autopar.ir.program import Program
from tests.capture.same_programs import assert_same_in_full

D = 4


class Block(nn.Module):
    def __init__(self, number: int = 0, width: int = D) -> None:
        super().__init__()
        self.number = number
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Numbered(Block):
    """Looks at its number."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / (self.number + 1)


class Late(Block):
    """Goes another way from its third layer on."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).tanh() if self.number > 1 else super().forward(x)


class Dropping(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.dropout(self.down(self.up(x).relu()), 0.5, self.training)


class Beside(Block):
    """Gives what it was given, what it made, and something that half of its parameters are in."""

    def forward(self, x: Tensor, *, first: Tensor, scale: float = 1.0) -> dict[str, Any]:
        inner = self.up(self.norm(x))
        return {
            "x": x + self.down(inner) * scale,
            "beside": (inner.mean(), first),
            "positive": (inner.sum() > 0).to(x.dtype),
        }


class Leaving(Block):
    """Leaves something for the model that it is in."""

    def forward(self, x: Tensor) -> Tensor:
        self.left = self.up(x).square().mean()
        return super().forward(x)


class Quiet(Block):
    """Has a part without a gradient."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = self.up(x).std()
        return super().forward(x) / scale


class Asking(Block):
    """Computes with a tensor that another object holds."""

    def __init__(self, held: dict[str, Tensor]) -> None:
        super().__init__()
        self.held = held

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.held["x"]


class Normed(nn.Module):
    """Writes statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(D, D), nn.BatchNorm1d(D)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.inner(x))


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.inner:
            x = block(x)
        return x.sin()


class Net(nn.Module):
    """`run(self, x)` between two layers."""

    def __init__(self, blocks: list[nn.Module], run: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.blocks, self.first, self.last = nn.ModuleList(blocks), nn.Linear(D, D), nn.Linear(D, D)
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.run(self, self.first(x))).square().mean()


def one_by_one(net: Any, x: Tensor) -> Tensor:
    for block in net.blocks:
        x = block(x)
    return x


def again_and_again(net: Any, x: Tensor) -> Tensor:
    for _ in range(5):
        x = net.blocks[0](x)
    return x


def with_what_is_beside(net: Any, x: Tensor) -> Tensor:
    first, out = x, {"x": x}
    for i, block in enumerate(net.blocks):
        out = block(out["x"], first=first, scale=0.5 if i == 1 else 1.0)
    return out["x"] + out["beside"][0] + out["positive"] + out["beside"][1]


def down_and_up(net: Any, x: Tensor) -> Tensor:
    held = []
    for block in net.blocks[:3]:
        x = block(x)
        held.append(x)
    for block in net.blocks[3:]:
        x = block(x + held.pop())
    return x


def under_autocast(net: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return one_by_one(net, x).float()


def checkpointed(net: Any, x: Tensor) -> Tensor:
    for block in net.blocks:
        x = checkpoint(block, x, use_reentrant=False)
    return x


def written_between(net: Any, x: Tensor) -> Tensor:
    for block in net.blocks:
        x = block(x)
        x += 1
        x[:, :2] = 0
    return x


def reading_what_is_left(net: Any, x: Tensor) -> Tensor:
    x = one_by_one(net, x)
    return x + sum(block.left for block in net.blocks)


def holding_the_first(net: Any, x: Tensor) -> Tensor:
    x = x.detach()
    net.blocks[0].held["x"] = x
    try:
        return one_by_one(net, x)
    finally:
        del net.blocks[0].held["x"]


def hooked() -> list[nn.Module]:
    blocks = [Block() for _ in range(4)]
    blocks[2].up.register_forward_hook(lambda module, args, out: out * 2)
    return blocks


def frozen() -> list[nn.Module]:
    blocks = [Block() for _ in range(4)]
    blocks[1].requires_grad_(False)
    blocks[2].up.weight.requires_grad_(False)
    return blocks


def holding_none_that_is_trained() -> list[nn.Module]:
    held: dict[str, Tensor] = {}
    return [Asking(held).requires_grad_(False) for _ in range(4)]


def tied() -> list[nn.Module]:
    blocks = [Block() for _ in range(4)]
    blocks[3].up.weight = blocks[0].up.weight
    blocks[2].down.bias = blocks[2].norm.bias
    return blocks


def evaluating() -> list[nn.Module]:
    blocks: list[nn.Module] = [Dropping() for _ in range(4)]
    blocks[2].eval()
    return blocks


def many(cls: Callable[..., nn.Module], count: int = 4, *args: Any) -> Callable[[], list[nn.Module]]:
    return lambda: [cls(*args) for _ in range(count)]


def numbered(cls: Callable[..., nn.Module]) -> Callable[[], list[nn.Module]]:
    return lambda: [cls(i) for i in range(4)]


@dataclasses.dataclass(frozen=True)
class Case:
    """repeated: how many calls are not traced."""

    name: str
    blocks: Callable[[], list[nn.Module]]
    repeated: int
    run: Callable[[Any, Tensor], Tensor] = one_by_one


CASES = (
    Case("the second block is the first with other parameters", many(Block), 3),
    Case("a number that a block never looks at may differ", numbered(Block), 3),
    Case("a number that it looks at may not", numbered(Numbered), 0),
    Case("a number may decide which way a block goes", numbered(Late), 0),
    Case("two kinds in turn", lambda: [(Block, Dropping)[i % 2]() for i in range(6)], 4),
    Case("dropout draws at every block", many(Dropping), 3),
    Case("one in another mode", evaluating, 2),
    Case("one block again and again", many(Block, 1), 3, again_and_again),
    Case("named arguments, nested results, inputs that are given back", many(Beside, 5), 2, with_what_is_beside),
    Case("connections around blocks", many(Block, 6), 5, down_and_up),
    Case("a hook inside one block", hooked, 2),
    Case("frozen parameters", frozen, 1),
    Case("tied parameters", tied, 2),
    Case("blocks in blocks", many(Outer, 3), 4),
    Case("autocast", many(Block), 3, under_autocast),
    Case("a part without gradients", many(Quiet), 3),
    Case("checkpoints", many(Block), 3, checkpointed),
    Case("results that are written to", many(Block), 3, written_between),
    Case("what a block leaves behind", many(Leaving), 0, reading_what_is_left),
    Case("a tensor found elsewhere", holding_none_that_is_trained, 2, holding_the_first),
    Case("statistics that a block writes", many(Normed), 0),
)
QUICK = {0, 2, 5, 7, 8, 9, 13, 14, 17, 19}


@pytest.fixture
def traces() -> Iterator[list[Repeats]]:
    """The calls that were found alike in each trace."""
    found: list[Repeats] = []
    plain = functional.with_repeats

    def noting(exported: Any, repeats: Repeats, writes: bool) -> bool:
        found.append(repeats)
        return plain(exported, repeats, writes)

    with mock.patch.object(functional, "with_repeats", noting):
        yield found


@pytest.mark.parametrize(
    "case", [pytest.param(c, id=c.name, marks=() if i in QUICK else pytest.mark.slow) for i, c in enumerate(CASES)]
)
def test_the_program_is_that_of_a_full_trace(case: Case, traces: list[Repeats]) -> None:
    def captured() -> Program:
        torch.manual_seed(0)
        return capture_program(Net(case.blocks(), case.run), (torch.randn(6, D),)).program

    assert_same_in_full(captured)
    assert len(traces[0].repeated) == case.repeated
    assert not traces[-1].repeated
