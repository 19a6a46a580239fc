"""Findings before a run: which ranks are concerned, what was seen, and what to set.

A check is a small function over the facts of all ranks that came; it looks at nothing else, so that a test can stage any machine.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..program.machines import Machines
from .facts import Facts


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong. where: ranks and hosts; stops: the run would not start, or not be the one that was asked for;
    else it would be slow."""

    what: str
    where: str
    evidence: str
    remedy: str
    stops: bool = True

    @property
    def text(self) -> str:
        """The finding on one line for people."""
        return f"{'error' if self.stops else 'slow'}: {self.what}: {self.where}: {self.evidence}; {self.remedy}"


@dataclass(frozen=True)
class Expected:
    """The ranks and machines that a run should have. ranks: of the program, and its spares; by_machine: ranks that came
    are machines."""

    ranks: int
    machines: Machines | None = None
    by_machine: bool = False


Check = Callable[[Sequence[Facts], Expected], Iterator[Finding]]


def who(ranks: Sequence[Facts]) -> str:
    """`ranks 0, 1 (host a), 4 (host b)`."""
    by_host: dict[str, list[int]] = defaultdict(list)
    for one in ranks:
        by_host[one.host].append(one.rank)
    named = [f"{numbers_text(numbers)} ({host})" for host, numbers in list(by_host.items())[:4]]
    more = f" and {len(by_host) - 4} more hosts" if len(by_host) > 4 else ""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(named) + more


def numbers_text(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:8])) + (", …" if len(numbers) > 8 else "")


def alike(facts: Sequence[Facts], fact: Callable[[Facts], Any]) -> list[tuple[Any, list[Facts]]]:
    """Ranks by what they say of one fact, the most common first (of equally common ones, the first rank's)."""
    by_value: dict[Any, list[Facts]] = defaultdict(list)
    for one in facts:
        by_value[fact(one)].append(one)
    return sorted(by_value.items(), key=lambda row: (-len(row[1]), row[1][0].rank))
