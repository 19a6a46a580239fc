"""Every dataclass that files are made of: what is written is read back as it was, and mutants are refused by name."""

from __future__ import annotations

import dataclasses
import json
import random
import types
import typing
from collections.abc import Mapping
from typing import Annotated, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autopar.cluster.device import Curve, DeviceSpec, Tiers, fastest_first
from autopar.cluster.files import Description, Runs
from autopar.cluster.kernels import COPY, KernelTimes, Points
from autopar.cluster.link import LinkLevel
from autopar.cluster.reliability import Reliability
from autopar.cluster.tiers import Tier
from autopar.errors import AutoparError
from autopar.ir.actions import Action, StageGraph
from autopar.ir.by_node import AxisByNode
from autopar.ir.mesh import Mesh
from autopar.passes.account.collectives import Collective
from autopar.passes.recompute.curve import Curve as RecomputeCurve
from autopar.report import program_facts as facts
from autopar.runtime.checkpoint.run_directory import StepRecord
from autopar.runtime.comm.recorder import RankRecord
from autopar.runtime.data import fields
from autopar.runtime.data.fields import IN_ROW, Form, Length, Pairs, from_data, kept, to_data
from autopar.runtime.data.schema import SchemaError, number
from autopar.runtime.health.flight import Left
from autopar.runtime.program.batches import BatchInput
from autopar.runtime.program.machines import Machines
from autopar.runtime.program.run_options import RunOptions
from autopar.runtime.run.excluded_nodes import Failure
from autopar.runtime.run.ownership import Owner
from autopar.runtime.run.rank_consistency import Told
from tests.mutations import mutated_data

KINDS = (
    DeviceSpec,
    KernelTimes,
    LinkLevel,
    Reliability,
    AxisByNode,
    Collective,
    RecomputeCurve,
    StageGraph,
    facts.AlternativeFacts,
    facts.CallFacts,
    facts.ParameterFacts,
    facts.ScheduleFacts,
    facts.StageFacts,
    facts.TransferFacts,
    RankRecord,
    Left,
    StepRecord,
    Owner,
    Failure,
    Told,
    Machines,
    BatchInput,
    RunOptions,
)
WORDS = ("bfloat16", "float32", "sm90", "failed", "slow", "none", "inductor", "dp", "", "a b", "ü")
TEXTS = st.sampled_from(WORDS) | st.text(st.characters(exclude_categories=("C", "Z")), max_size=8)
PLAIN: dict[Any, st.SearchStrategy[Any]] = {
    float: st.floats(1e-6, 1e6) | st.sampled_from((0.0, 0.25, 1.0)),
    int: st.integers(1, 2000) | st.sampled_from((0, -1)),
    bool: st.booleans(),
    str: TEXTS,
    Any: st.none() | st.lists(st.integers()),
}
POINTS = st.dictionaries(st.floats(1, 1e9), st.floats(1e-9, 1), min_size=2, max_size=4).map(
    lambda found: tuple(sorted(found.items()))
)
TIERS = st.lists(
    st.builds(Tier, st.sampled_from(("ddr", "nvme")), st.floats(1, 1e12), st.floats(1, 1e12), st.floats(0, 1)),
    unique_by=lambda tier: tier.name,
)
ACTIONS = st.builds(Action, st.sampled_from("FBW"), st.integers(0, 99), st.integers(0, 9))
BY_ACTION = st.dictionaries(st.tuples(st.integers(0, 9), st.sampled_from("FBW")), st.floats(0, 9))
NOTATIONS: dict[Any, st.SearchStrategy[Any]] = {
    Points: POINTS,
    Curve: st.deferred(lambda: made(typing.get_args(Curve)[0])),
    Tiers: TIERS.map(fastest_first),
    facts.Row: st.lists(ACTIONS).map(tuple),
    facts.ByAction: BY_ACTION,
    typing.get_type_hints(facts.ScheduleFacts, include_extras=True)["hand_over"]: st.dictionaries(
        st.tuples(st.integers(0, 9), st.integers(0, 9)), st.floats(0, 9)
    ),
    typing.get_type_hints(StepRecord, include_extras=True)["files"]: st.dictionaries(
        st.sampled_from(("a", "b/c")), st.fixed_dictionaries({"bytes": st.integers(0, 99), "sha256": st.just("0")})
    ),
    KernelTimes: st.deferred(
        lambda: st.builds(
            KernelTimes,
            passes=st.tuples(POINTS, POINTS).map(lambda two: {COPY: two[0], "aten.gelu": two[1]}),
            products=of(typing.get_type_hints(KernelTimes, include_extras=True)["products"]),
            causal_tile=st.floats(0, 512),
        )
    ),
    Mesh: st.sampled_from((Mesh(()), Mesh.of(dp=2, tp=4), Mesh((("dp", 2),), 6))),
}


def of(hint: Any) -> st.SearchStrategy[Any]:
    """Values that a type hint allows."""
    if hint in NOTATIONS:
        return NOTATIONS[hint]
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return made(hint)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        (said,) = arguments[1:]
        if said is IN_ROW:
            return of(arguments[0])
        if isinstance(said, Length) and not isinstance(said, Pairs):
            return of(arguments[0]).filter(lambda value: said.least <= len(value) <= said.most)
        read = fields.form_of(hint).read
        return of(arguments[0]).filter(lambda value: accepts(read, value))
    if origin in (types.UnionType, typing.Union):
        return st.none() | of(next(kind for kind in arguments if kind is not types.NoneType))
    if origin is tuple and arguments[-1] is not ...:
        return st.tuples(*map(of, arguments))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return st.dictionaries(*map(of, arguments), min_size=1, max_size=3)
    if origin is not None:
        return st.lists(of(arguments[0]), max_size=3).map(list if origin is list else tuple)
    return PLAIN[hint]


def accepts(read: Any, value: Any) -> bool:
    try:
        read(value, "")
    except SchemaError:
        return False
    return True


def made(kind: Any) -> st.SearchStrategy[Any]:
    """Instances of a dataclass; fields that are not of the file stay as they are."""
    hints = typing.get_type_hints(kind, include_extras=True)
    said = {one.name: one.metadata.get("kept") for one in dataclasses.fields(kind)}
    asked = {name: of(hint) for name, hint in hints.items() if name in said and not (said[name] and said[name].absent)}
    for name in ("starts", "version"):
        if name in asked:
            asked[name] = st.just(getattr(kind, name))
    return st.builds(kind, **asked)


@settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@given(data=st.data())
def test_what_is_written_is_read_back(kind: Any, data: st.DataObject) -> None:
    value = data.draw(made(kind) if kind not in NOTATIONS else NOTATIONS[kind])
    text = json.dumps(to_data(value), allow_nan=False)
    assert from_data(kind, json.loads(text)) == value
    assert json.dumps(to_data(from_data(kind, json.loads(text)))) == text


@settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck))
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@given(data=st.data(), seed=st.integers(0, 1 << 30))
def test_mutants_are_read_or_refused_by_name(kind: Any, data: st.DataObject, seed: int) -> None:
    value = data.draw(made(kind) if kind not in NOTATIONS else NOTATIONS[kind])
    pick = random.Random(seed)
    for _ in range(8):
        mutant = mutated_data(json.loads(json.dumps(to_data(value))), pick)
        try:
            from_data(kind, mutant)
        except (SchemaError, AutoparError) as error:
            assert str(error).isprintable() or "\n" not in str(error)


@dataclasses.dataclass(frozen=True)
class Pump:
    """A dataclass with every kind of place in a file."""

    name: str
    rate_Bps: Annotated[float, number(1, 1e12)] = dataclasses.field(metadata=kept(unit=("rate_GBps", 1e9)))
    valves: tuple[str, ...] = dataclasses.field(default=(), metadata=kept(sparse=True))
    turns: Annotated[dict[str, float], Length(most=2)] = dataclasses.field(default_factory=dict)


def test_a_figure_in_another_unit_becomes_that_of_its_field() -> None:
    pump = Pump("a", 5e9)
    assert from_data(Pump, {"name": "a", "rate_GBps": 5}) == from_data(Pump, {"name": "a", "rate_Bps": 5e9}) == pump
    assert to_data(pump) == {"name": "a", "rate_Bps": 5e9, "turns": {}}
    for data, says in (
        ({"name": "a"}, "pump: 'rate_GBps' is missing"),
        ({"name": "a", "rate_GBps": "fast"}, "pump.rate_GBps must be a number, got 'fast'"),
        (
            {"name": "a", "rate_GBps": -1},
            "pump.rate_GBps as rate_Bps must be a number from 1 to 1e+12, got -1000000000.0",
        ),
        ({"name": "a", "rate": 1}, "pump: unknown key 'rate'; allowed: name, rate_Bps, rate_GBps, valves, turns"),
        (5, "pump must be a mapping with the keys name, rate_GBps, got 5"),
    ):
        with pytest.raises(SchemaError) as caught:
            from_data(Pump, data, "pump")
        assert str(caught.value) == says


def test_some_fields_are_read_for_a_change() -> None:
    assert fields.given(Pump, {"rate_GBps": 2}) == {"rate_Bps": 2e9}
    with pytest.raises(SchemaError, match="unknown key 'valves'; allowed: extra, rate_Bps, rate_GBps"):
        fields.given(Pump, {"valves": []}, only=("rate_Bps",), also={"extra": number()})


def test_constructors_settle_what_they_are_given() -> None:
    pump = Pump("a", 5e9, ["v"])  # type: ignore[arg-type]
    fields.settle(pump)
    assert pump.valves == ("v",)
    with pytest.raises(SchemaError, match="rate_Bps must be a number"):
        fields.settle(dataclasses.replace(pump, rate_Bps=0))


def test_a_hint_that_says_nothing_of_files_is_refused() -> None:
    with pytest.raises(TypeError, match="says nothing of files"):
        fields.form_of(set[int])
    assert isinstance(fields.form_of(int), Form)


def test_a_cluster_is_written_with_its_runs() -> None:
    device = DeviceSpec("d", {"fp16": 1e12}, 1e9, 1e11)
    found = from_data(
        Description,
        {
            "name": "c",
            "devices": [{"count": 2, "device": to_data(device)}],
            "levels": [to_data(LinkLevel("node", 2, 1e9))],
        },
    )
    runs: Runs = ((2, device),)
    assert found.devices == runs
    assert list(device.peak_flops) == ["float16"]
