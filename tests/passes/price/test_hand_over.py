"""A message from stage to stage costs what the links between the two stages take, wherever these lie."""

from __future__ import annotations

import pytest

from autopar.cluster import ClusterSpec
from autopar.costmodel.collective import collective_time_s
from autopar.ir.mesh import Mesh
from autopar.passes.price.pricer import Pricers

NBYTES = 1e7
SLOW_BETWEEN_NODES = ClusterSpec.homogeneous(
    devices=16, device="a100", devices_per_node=4, inter_bandwidth_Bps=1.25e9, name="four nodes of four"
)
INSIDE_S = collective_time_s(SLOW_BETWEEN_NODES, "p2p", NBYTES, (0, 1))
OUTSIDE_S = collective_time_s(SLOW_BETWEEN_NODES, "p2p", NBYTES, (3, 4))


@pytest.mark.parametrize(
    ("source", "target", "seconds"),
    [
        (Mesh((("dp", 2),), 4), Mesh((("dp", 2),), 6), INSIDE_S),
        (Mesh((("dp", 2),), 6), Mesh((("dp", 2),), 4), INSIDE_S),
        (Mesh((("dp", 2),), 6), Mesh((("dp", 2),), 8), OUTSIDE_S),
        (Mesh((("dp", 4),), 0), Mesh((("dp", 2),), 4), OUTSIDE_S),
        (Mesh((("dp", 2),), 0), Mesh((("dp", 6),), 2), OUTSIDE_S),
    ],
)
def test_a_message_crosses_the_slowest_link_between_its_two_stages(source: Mesh, target: Mesh, seconds: float) -> None:
    assert Pricers(SLOW_BETWEEN_NODES).hand_over_s(NBYTES, source, target) == seconds


@pytest.mark.parametrize(("ranks", "inside", "outside"), [(1, 12, 3), (2, 4, 3), (4, 0, 3), (8, 0, 1)])
def test_before_stages_have_a_place_a_message_costs_what_it_does_on_average(
    ranks: int, inside: int, outside: int
) -> None:
    pricer = Pricers(SLOW_BETWEEN_NODES)[Mesh.of(dp=ranks)]
    average_s = (inside * INSIDE_S + outside * OUTSIDE_S) / (inside + outside)
    assert pricer.hand_over_s(NBYTES) == pytest.approx(average_s, rel=1e-12)


def test_the_only_stage_of_a_cluster_hands_nothing_over() -> None:
    assert Pricers(SLOW_BETWEEN_NODES)[Mesh.of(dp=16)].hand_over_s(NBYTES) == 0
