"""The findings from facts of any machines: those that one machine cannot stage have theirs made up."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from autopar.runtime.preflight.facts import Device, Facts, Interface, Place, own_facts
from autopar.runtime.preflight.finding import Expected, Finding
from autopar.runtime.preflight.links import Measured, rounds, slow_links
from autopar.runtime.preflight.main import findings
from autopar.runtime.preflight.ranks import roll_call
from autopar.runtime.program.machines import LinkRate, Machines

MACHINES = Machines(4, "h100", True, (LinkRate("node", 4, 4e11, 2e-6), LinkRate("cluster", 8, 5e10, 5e-6)))
EXPECTED = Expected(8, MACHINES)
BUSES = tuple(f"0000:{n:02x}:00.0" for n in (0x1B, 0x2C, 0x9A, 0xAB))


def healthy(rank: int) -> Facts:
    """Two machines of four GPUs, over InfiniBand."""
    host, local = f"node{rank // 4}", rank % 4
    own = own_facts(Place(rank, 8, local, 4, "127.0.0.1", 29500), [], "nccl", None, [])
    eth = Interface("eth0", True, f"10.0.0.{rank // 4 + 1}")
    return replace(
        own,
        host=host,
        process=1000 + rank,
        interfaces=(eth,),
        named={},
        address=eth.address,
        versions={"torch": "2.13.0", "NCCL": "2.28.9"},
        devices=tuple(Device("NVIDIA H100", bus, n // 2) for n, bus in enumerate(BUSES)),
        shm=64 << 30,
        shm_free=60 << 30,
        cpus=tuple(range(16 * local, 16 * local + 16)),
        threads=8,
        numa_cpus={"0": tuple(range(32)), "1": tuple(range(32, 64))},
        open_files=1 << 20,
        locked=None,
        infiniband=True,
    )


RANKS = [healthy(rank) for rank in range(8)]


def changed(ranks: tuple[int, ...], **facts: object) -> list[Facts]:
    return [replace(one, **facts) if one.rank in ranks else one for one in RANKS]  # type: ignore[arg-type]


def only(found: list[Finding]) -> Finding:
    assert len(found) == 1, [one.text for one in found]
    return found[0]


def test_healthy_machines_have_no_findings():
    assert findings(RANKS, EXPECTED) == []


@pytest.mark.parametrize(
    ("ranks", "facts", "what", "where", "remedy", "stops"),
    [
        (
            (4, 5, 6, 7),
            {"versions": {"torch": "2.13.0", "NCCL": "2.21.5"}},
            "another version",
            "4, 5, 6, 7 (node1)",
            "image",
            True,
        ),
        ((1,), {"devices": RANKS[0].devices[:2]}, "visible devices", "rank 1 (node0)", "CUDA_VISIBLE_DEVICES", True),
        (
            (5,),
            {"devices": RANKS[0].devices[::-1]},
            "visible devices",
            "ranks 5, 6 (node1)",
            "CUDA_VISIBLE_DEVICES",
            True,
        ),
        (
            (4, 5, 6, 7),
            {"devices": RANKS[0].devices[::-1]},
            "order of devices",
            "(node1)",
            "CUDA_DEVICE_ORDER=PCI_BUS_ID",
            False,
        ),
        ((7,), {"cpus": tuple(range(8))}, "NUMA binding", "rank 7 (node1)", "numactl --cpunodebind=1", False),
        ((0, 1, 2, 3), {"cpus": (0, 32)}, "CPU binding", "node0", "--cpus-per-task", False),
        ((0, 1, 2, 3), {"cpus": tuple(range(64)), "threads": 64}, "CPU threads", "node0", "OMP_NUM_THREADS=16", False),
        ((4, 5, 6, 7), {"shm": 64 << 20, "shm_free": 64 << 20}, "shared memory", "node1", "--shm-size", True),
        ((2,), {"locked": 64 << 10}, "locked memory", "rank 2 (node0)", "ulimit -l unlimited", True),
        ((6,), {"open_files": 256}, "open files", "rank 6 (node1)", "ulimit -n 320", True),
        ((3,), {"local_rank": 0, "devices": RANKS[0].devices}, "visible devices", "ranks 0, 3", "LOCAL_RANK", True),
        ((3,), {"master_addresses": ()}, "address of the first machine", "rank 3 (node0)", "MASTER_ADDR", True),
        ((2,), {"named": {"NCCL_SOCKET_IFNAME": "ib"}}, "network interface", "rank 2 (node0)", "eth0", True),
        ((1,), {"wanted": ("/data/train.py",)}, "missing file", "rank 1 (node0)", "every machine has", True),
    ],
)
def test_what_is_wrong_is_named_with_what_to_set(ranks, facts, what, where, remedy, stops):
    found = [one for one in findings(changed(ranks, **facts), EXPECTED) if one.what == what]
    finding = only(found)
    assert where in finding.where
    assert remedy in finding.remedy
    assert finding.stops is stops


def test_ranks_that_each_see_one_gpu_of_their_own_are_right_and_those_that_see_the_same_are_not():
    apart = [replace(one, devices=(one.devices[one.local_rank],)) for one in RANKS]
    assert findings(apart, EXPECTED) == []
    found = only(findings([replace(one, devices=one.devices[:1]) for one in RANKS], EXPECTED)[:1])
    assert (found.what, found.stops) == ("visible devices", True)
    assert "they share the GPU at 0000:1b:00.0" in found.evidence


def test_prefixes_of_interfaces_and_those_left_out_are_nccls():
    assert findings(changed(range(8), named={"NCCL_SOCKET_IFNAME": "eth"}), EXPECTED) == []  # type: ignore[arg-type]
    assert findings(changed(range(8), named={"NCCL_SOCKET_IFNAME": "^docker,lo"}), EXPECTED) == []  # type: ignore[arg-type]
    found = findings(changed((0,), named={"NCCL_SOCKET_IFNAME": "=eth"}), EXPECTED)
    assert "no interface eth" in only(found).evidence


def test_ranks_that_take_turns_between_machines_are_swapped():
    turned = [replace(one, host=f"node{one.rank % 2}", local_rank=one.rank // 2) for one in RANKS]
    found = [one for one in findings(turned, EXPECTED) if one.what == "swapped ranks"]
    assert "0, 2, 4, 6 (node0), 1, 3, 5, 7 (node1)" in only(found).where


def test_local_ranks_that_count_otherwise_are_swapped():
    turned = [replace(one, local_rank=3 - one.local_rank) for one in RANKS]
    found = [one for one in findings(turned, EXPECTED) if one.what == "swapped ranks"]
    assert "LOCAL_RANK" in only(found).evidence


def test_the_roll_names_who_is_absent_and_who_came_twice():
    came = {rank: [one] for rank, one in enumerate(RANKS[:6])} | {6: [], 7: []}
    assert only(roll_call(8, came, 30.0)).where == "ranks 6, 7"
    came = {rank: [one] for rank, one in enumerate(RANKS)} | {3: [RANKS[3], replace(RANKS[3], host="old", process=4)]}
    assert "node0 (process 1003) and old (process 4)" in only(roll_call(8, came, 30.0)).evidence


def test_facts_travel_as_they_are():
    assert Facts.of(json.loads(json.dumps(RANKS[0].as_data()))) == RANKS[0]


# ---- links


def test_every_pair_of_neighbouring_blocks_talks_once_and_no_rank_twice_at_a_time():
    seen = []
    for _, pairs in rounds(8, MACHINES.links):
        ranks = [rank for pair in pairs for rank in pair]
        assert len(ranks) == len(set(ranks))
        seen += pairs
    inside = [(a, a + 1) for a in (0, 1, 2, 4, 5, 6)]
    assert sorted(seen) == sorted([*inside, *((a, a + 4) for a in range(4))])


def measured(slow: dict[tuple[int, int], float], late_s: float = 2e-5) -> list[Measured]:
    rates = {level.name: 0.8 * level.bytes_per_s for level in MACHINES.links}
    return [
        Measured(level.name, pair, slow.get(pair, rates[level.name]), late_s)
        for level, pairs in rounds(8, MACHINES.links)
        for pair in pairs
    ]


def test_links_as_described_are_no_finding():
    assert slow_links(measured({}), MACHINES, RANKS) == []


def test_a_link_that_is_slower_than_described_is_named():
    finding = only(slow_links(measured({(2, 6): 1.2e9}), MACHINES, RANKS))
    assert finding.where == "ranks 2 (node0), 6 (node1)"
    assert "1.2 GB/s over cluster, described as 50 GB/s; the median of 4 pairs is 40 GB/s" in finding.evidence
    assert "NET/Socket" in finding.remedy
    assert not finding.stops


def test_a_link_that_is_slower_than_its_like_is_named_whatever_is_described():
    modest = replace(MACHINES, links=(MACHINES.links[0], replace(MACHINES.links[1], bytes_per_s=1e9)))
    finding = only(slow_links(measured({(1, 5): 1e10}), modest, RANKS))
    assert "ranks 1 (node0), 5 (node1)" in finding.where


def test_messages_that_take_long_are_named():
    (inner, outer) = slow_links(measured({}, late_s=5e-3), MACHINES, RANKS)
    assert (inner.what, outer.what) == ("late link", "late link")
    assert "5 ms over cluster; the cluster's description says 5 µs" in outer.evidence


def test_a_place_without_torchrun_is_that_of_a_machine():
    place = Place.of({"NODE_RANK": "1", "MASTER_ADDR": "node0"}, 4, 8)
    assert (place.rank, place.ranks, place.local_ranks, place.by_machine) == (1, 2, 4, True)
