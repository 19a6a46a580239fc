"""Links before a run: does a rank reach its neighbours, and how fast, compared with the cluster's description.

Ranks are paired with their neighbours, level of links by level: inside a level ranks of one block talk with the same ranks of
the next block, all pairs at once, as they do in a step (a rate of the description is what a rank gets while all send). Two
rounds a level meet every pair of blocks that follow each other. So a slow cable or a port that fell back to a lower rate
shows as slow pairs of one machine; links between machines that are no neighbours are not measured.
"""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ..comm.backends import backend_of, transport_named
from ..program.machines import LinkRate, Machines
from .facts import Facts, Place
from .finding import Finding, who

SLOW_BESIDE_OTHERS = 0.5
"""The share of the median rate of its level below which a link is slow."""
LATE_TIMES, LATE_OWN_S = 10.0, 1e-3
"""Times the described latency, and seconds that starting a message from Python takes beside it at most."""
PROBE_S = 0.15
"""Seconds that one exchange of the measured size is to take."""
FIRST_BYTES, MOST_BYTES = 1 << 18, 1 << 27
CONNECT_S = 3.0


@dataclass(frozen=True)
class Measured:
    """The rate and latency that two ranks measured. bytes_per_s: in each direction, both at once."""

    level: str
    ranks: tuple[int, int]
    bytes_per_s: float
    latency_s: float


# ---- pure


def rounds(ranks: int, links: Sequence[LinkRate]) -> Iterator[tuple[LinkRate, list[tuple[int, int]]]]:
    """Which ranks talk at once, for one level after the other; every rank is in at most one pair of a round."""
    inner = 1
    for level in links:
        for parity in (0, 1):
            pairs = [
                (block * inner + place, (block + 1) * inner + place)
                for block in range(parity, ranks // inner - 1, 2)
                if block * inner // level.group_size == (block + 1) * inner // level.group_size
                for place in range(inner)
            ]
            if pairs:
                yield level, pairs
        inner = max(inner, level.group_size)


def slow_links(measured: Sequence[Measured], machines: Machines, facts: Sequence[Facts]) -> list[Finding]:
    """Pairs that are far from the cluster's description, or from the other pairs of their level."""
    by_rank = {one.rank: one for one in facts}
    transport = transport_named(facts[0].backend)
    found = []
    for level in machines.links:
        pairs = [one for one in measured if one.level == level.name]
        if not pairs:
            continue
        usual = statistics.median(one.bytes_per_s for one in pairs)
        slow = [o for o in pairs if o.bytes_per_s < max(_least(o, level, by_rank), usual * SLOW_BESIDE_OTHERS)]
        if slow:
            worst = min(slow, key=lambda one: one.bytes_per_s)
            found.append(
                Finding(
                    "slow link",
                    _between(worst, by_rank),
                    f"{_rate(worst.bytes_per_s)} over {level.name}, described as {_rate(level.bytes_per_s)}; the "
                    f"median of {len(pairs)} pairs is {_rate(usual)}"
                    + (f" ({len(slow)} are slow)" if len(slow) > 1 else ""),
                    transport.slow_remedy,
                    stops=False,
                )
            )
        late = [one for one in pairs if one.latency_s > LATE_TIMES * level.latency_s + LATE_OWN_S]
        if late:
            worst = max(late, key=lambda one: one.latency_s)
            found.append(
                Finding(
                    "late link",
                    _between(worst, by_rank),
                    f"a small message takes {worst.latency_s * 1e3:.3g} ms over {level.name}; the cluster's description says "
                    f"{level.latency_s * 1e6:.3g} µs",
                    "see which way packets take (traceroute), and that no other job uses these machines",
                    stops=False,
                )
            )
    return found


def _least(pair: Measured, level: LinkRate, by_rank: dict[int, Facts]) -> float:
    """Bytes/s that a pair must reach by the description. What goes through sockets inside a machine takes no link."""
    one, other = (by_rank[rank] for rank in pair.ranks)
    transport = transport_named(one.backend)
    return 0.0 if transport.by_sockets and one.host == other.host else level.bytes_per_s * transport.slow_share


def level_lines(measured: Sequence[Measured], machines: Machines) -> Iterator[str]:
    """The measured rates and latencies, for people."""
    for level in machines.links:
        rates = sorted(one.bytes_per_s for one in measured if one.level == level.name)
        late = sorted(one.latency_s for one in measured if one.level == level.name)
        if rates:
            yield (
                f"  {level.name}: {len(rates)} pairs, {_rate(rates[0])} to {_rate(rates[-1])} each way (described: "
                f"{_rate(level.bytes_per_s)}), {late[0] * 1e6:.0f} to {late[-1] * 1e6:.0f} µs"
            )


def _between(one: Measured, by_rank: dict[int, Facts]) -> str:
    return who([by_rank[rank] for rank in one.ranks])


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.3g} GB/s" if bytes_per_s >= 1e8 else f"{bytes_per_s / 1e6:.3g} MB/s"


# ---- in contact with others


def listener(address: str) -> socket.socket:
    """A socket that others can connect to, at any free port of this rank's address."""
    family, everywhere = (socket.AF_INET6, "::") if ":" in address else (socket.AF_INET, "0.0.0.0")
    one = socket.socket(family, socket.SOCK_STREAM)
    try:
        one.bind((address or everywhere, 0))
    except OSError:
        one.bind((everywhere, 0))
    one.listen(64)
    return one


def unreachable(place: Place, facts: Sequence[Facts]) -> list[tuple[int, str]]:
    """Which of its neighbours, next rank and next machine, this rank cannot connect to, and why."""
    found = []
    own = place.rank
    for rank in sorted({(own + 1) % len(facts), (own + place.local_ranks) % len(facts)} - {own}):
        other = facts[rank]
        try:
            socket.create_connection((other.address, other.port), CONNECT_S).close()
        except OSError as error:
            found.append((rank, error.strerror or str(error)))
    return found


def reach_findings(problems: dict[int, list[tuple[int, str]]], facts: Sequence[Facts]) -> list[Finding]:
    """Ranks that do not reach others. problems: `unreachable` by rank."""
    pairs = [(facts[rank], facts[other], why) for rank, rows in problems.items() for other, why in rows]
    if not pairs:
        return []
    one, other, why = pairs[0]
    more = f" (and {len(pairs) - 1} more pairs)" if len(pairs) > 1 else ""
    return [
        Finding(
            "closed port",
            who([one]),
            f"cannot connect to {who([other])} at {other.address}, port {other.port}: {why}{more}",
            "let the firewall pass all TCP ports between the machines (ranks listen at ports of the system's choice), or set "
            "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the interface that joins them",
        )
    ]


def measure(place: Place, links: Sequence[LinkRate], device: torch.device) -> list[Measured]:
    """This rank's pairs, said by the lower of their ranks. The process group is there, and all ranks call this together."""
    found = []
    for level, pairs in rounds(place.ranks, links):
        dist.barrier()
        pair = next((pair for pair in pairs if place.rank in pair), None)
        if pair is not None:
            peer = sum(pair) - place.rank
            latency_s, rate = _pair(place.rank, peer, device)
            if place.rank == pair[0]:
                found.append(Measured(level.name, pair, rate, latency_s))
    return found


def _pair(rank: int, peer: int, device: torch.device) -> tuple[float, float]:
    """Seconds of a small message and bytes/s of a large one, between this rank and another."""
    latency_s = min(_exchange(rank, peer, 8, device) for _ in range(12))
    own_s = min(_exchange(rank, peer, FIRST_BYTES, device) for _ in range(3))
    seconds = torch.tensor([own_s, own_s], dtype=torch.float64, device=device)
    _swap(peer, seconds[:1], seconds[1:])
    nbytes = int(min(MOST_BYTES, max(FIRST_BYTES, FIRST_BYTES * PROBE_S / float(seconds.max()))))
    large_s = min(_exchange(rank, peer, nbytes, device) for _ in range(3))
    return latency_s, nbytes / large_s


def _exchange(rank: int, peer: int, nbytes: int, device: torch.device) -> float:
    """Seconds that so many bytes take, in both directions at once."""
    sent = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    received = torch.zeros_like(sent)
    synchronize = backend_of(device).module.synchronize
    synchronize(device)
    start = time.perf_counter()
    _swap(peer, sent, received)
    synchronize(device)
    return time.perf_counter() - start


def _swap(peer: int, sent: torch.Tensor, received: torch.Tensor) -> None:
    works: list[Any]
    if transport_named(dist.get_backend()).in_order:
        works = dist.batch_isend_irecv([dist.P2POp(dist.isend, sent, peer), dist.P2POp(dist.irecv, received, peer)])
    else:
        works = [dist.isend(sent, peer), dist.irecv(received, peer)]
    for work in works:
        if work is not None:
            work.wait()
