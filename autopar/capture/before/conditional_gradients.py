"""When a module's tensors have a gradient, learned from what its own forward does with random choices.

A module that loops over what the rows chose gives no gradient to a part that no row took: in eager `grad` stays None, which
is not a gradient of zeros. Which rows those are is asked of the module, not of its name. Each draw tells which tensors had a
gradient, and which numbers the rows named; a tensor's own numbers are those that no draw without a gradient named:

    chosen [[0, 2]]   experts 0, 2: a gradient   1, 3: None
    chosen [[1, 2]]   experts 1, 2: a gradient   0, 3: None      numbers of expert 0: {0, 1, 2, 3} - {1, 2} - {2, 3} = {0}
    chosen [[2, 3]]   experts 2, 3: a gradient   0, 1: None

and every draw with a gradient must have named one of them. A number is certain if a draw with a gradient named it and no other
of the tensor's. Where no integers that the module is given explain all draws, nothing is learned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

Way = tuple[int, bool]
"""How integers name parts: which of the integer tensors does, and whether by its values or by the places along its last dim
that are not zero (one-hot)."""


@dataclass(frozen=True, eq=False)
class Draw:
    """The result of one draw. present: whether each tensor had a gradient; named: the numbers that the rows named, per way."""

    present: Mapping[str, bool]
    named: Mapping[Way, frozenset[int]]


@dataclass(frozen=True, eq=False)
class Sometimes:
    """Tensors of a module that have a gradient in some steps only: if its integer tensor `choice` names one of `numbers`,
    per tensor. one_hot: by places along its last dim, else by values."""

    choice: int = 0
    one_hot: bool = False
    numbers: Mapping[str, frozenset[int]] = field(default_factory=dict)

    @property
    def below(self) -> int:
        """A number above all of them."""
        return 1 + max(max(numbers) for numbers in self.numbers.values())

    def same(self, other: Sometimes) -> bool:
        """Whether both say the same."""
        return (self.choice, self.one_hot, dict(self.numbers)) == (other.choice, other.one_hot, dict(other.numbers))


def named(choices: Sequence[Tensor]) -> dict[Way, frozenset[int]]:
    """The numbers that integer tensors name."""
    found: dict[Way, frozenset[int]] = {}
    for i, chosen in enumerate(choices):
        found[i, False] = frozenset(chosen.unique().long().tolist())
        if chosen.ndim > 1:
            found[i, True] = frozenset((chosen != 0).flatten(0, -2).any(0).nonzero().flatten().tolist())
    return found


def varying(draws: Sequence[Draw]) -> list[str]:
    """Tensors that had a gradient in some draws and none in others."""
    return [slot for slot in draws[0].present if len({draw.present[slot] for draw in draws}) == 2]


def learned(draws: Sequence[Draw]) -> Sometimes | None:
    """The first way that explains all draws; None where there is none."""
    slots = varying(draws)
    for way in draws[0].named:
        every = frozenset[int]().union(*(draw.named[way] for draw in draws))
        numbers = {
            slot: every.difference(*(draw.named[way] for draw in draws if not draw.present[slot])) for slot in slots
        }
        explains = all(numbers[slot] & draw.named[way] for slot in slots for draw in draws if draw.present[slot])
        if explains and min(map(min, numbers.values()), default=0) >= 0:
            return Sometimes(*way, numbers)
    return None


def doubtful(draws: Sequence[Draw], found: Sometimes) -> frozenset[int]:
    """Numbers that another number of the same tensor may stand for, as no draw named the one without the other."""
    way, doubted = (found.choice, found.one_hot), frozenset[int]()
    for slot, numbers in found.numbers.items():
        alone = (numbers & draw.named[way] for draw in draws if draw.present[slot])
        doubted |= numbers - frozenset[int]().union(*(own for own in alone if len(own) == 1))
    return doubted
