"""Every dataclass that files are made of: what is written is read back as it was, and mutants are refused by name."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import random
import types
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cluster.device import Curve, DeviceSpec, Tiers, fastest_first
from autopar.cluster.files import Description, Runs
from autopar.cluster.kernels import COPY, KernelTimes, Points
from autopar.cluster.link import LinkLevel
from autopar.cluster.reliability import Reliability
from autopar.cluster.tiers import Tier
from autopar.costmodel.calibrate import Ranks
from autopar.errors import AutoparError
from autopar.ir.actions import Action, StageGraph
from autopar.ir.by_node import AxisByNode
from autopar.ir.mesh import Mesh
from autopar.passes.account.collectives import Collective
from autopar.passes.account.spent import Spent
from autopar.passes.recompute.curve import Curve as RecomputeCurve
from autopar.report import program_facts as facts
from autopar.runtime.checkpoint.run_directory import Files, StepRecord
from autopar.runtime.comm.recorder import RankRecord
from autopar.runtime.data import fields
from autopar.runtime.data.fields import Form, Length, from_data, kept, to_data
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
    Ranks,
    LinkLevel,
    Reliability,
    AxisByNode,
    Collective,
    RecomputeCurve,
    StageGraph,
    facts.AlternativeFacts,
    facts.CallFacts,
    facts.ParameterFacts,
    facts.RoomFacts,
    facts.WorkFacts,
    Spent,
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
WORDS = ("bfloat16", "float32", "sm90", "failed", "slow", "none", "inductor", "highest", "dp", "", "a b", "ü")
Pick = random.Random
Plain = Callable[[Pick], Any]
PLAIN: dict[Any, Plain] = {
    float: lambda pick: pick.choice((0.0, 0.25, 1.0, pick.uniform(0, 100), 1e9)),
    int: lambda pick: pick.choice((0, 1, 3, pick.randrange(2000), -1)),
    bool: lambda pick: pick.random() < 0.5,
    str: lambda pick: pick.choice(WORDS),
    Any: lambda pick: pick.choice((None, [1, 2], {"a": 1.5})),
}


def some(pick: Pick, one: Plain, least: int = 0) -> list[Any]:
    return [one(pick) for _ in range(pick.randrange(least, 4))]


def points(pick: Pick) -> Any:
    return tuple((float(nbytes), pick.uniform(1e-9, 1)) for nbytes in sorted(pick.sample(range(1, 10**6), 3)))


def tiers(pick: Pick) -> Any:
    names = pick.sample(("ddr", "nvme"), pick.randrange(3))
    return fastest_first(Tier(name, pick.uniform(1, 1e12), pick.uniform(1, 1e12), pick.random()) for name in names)


def action(pick: Pick) -> Action:
    return Action(pick.choice("FBW"), pick.randrange(99), pick.randrange(9))


def hint_of(kind: Any, name: str) -> Any:
    return typing.get_type_hints(kind, include_extras=True)[name]


NOTATIONS: dict[Any, Plain] = {
    Points: points,
    Curve: lambda pick: made(typing.get_args(Curve)[0], pick),
    Tiers: tiers,
    facts.Row: lambda pick: tuple(some(pick, action)),
    facts.ByAction: lambda pick: {(pick.randrange(9), "F"): pick.random() for _ in range(3)},
    facts.ByTransfer: lambda pick: {(1, pick.randrange(9)): pick.random() for _ in range(3)},
    Files: lambda pick: {"a/b": {"bytes": pick.randrange(99), "sha256": "0"}},
    KernelTimes: lambda pick: KernelTimes(
        {COPY: points(pick), "aten.gelu": points(pick)}, of(hint_of(KernelTimes, "products"), pick), pick.random()
    ),
    Mesh: lambda pick: pick.choice((Mesh(()), Mesh.of(dp=2, tp=4), Mesh((("dp", 2),), 6))),
}
"""Values of hints with a notation of their own."""


def of(hint: Any, pick: Pick) -> Any:
    """A value that a type hint allows, found by trying."""
    if hint in NOTATIONS:
        return NOTATIONS[hint](pick)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return made(hint, pick)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hasattr(hint, "_fields"):
        return hint(*(of(hint_of(hint, name), pick) for name in hint._fields))
    if origin is Annotated or hint in PLAIN:
        read, kind = fields.form_of(hint).read, arguments[0] if origin is Annotated else hint
        for _ in range(1000):
            value = PLAIN[kind](pick) if kind in PLAIN else of(kind, pick)
            with contextlib.suppress(SchemaError):
                read(value, "")
                return value
        raise AssertionError(f"no value of {hint} was found")
    if origin in (types.UnionType, typing.Union):
        return pick.choice((None, of(next(kind for kind in arguments if kind is not types.NoneType), pick)))
    if origin is tuple and arguments[-1] is not ...:
        return tuple(of(kind, pick) for kind in arguments)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {of(arguments[0], pick): of(arguments[1], pick) for _ in range(pick.randrange(1, 4))}
    entries = some(pick, lambda pick: of(arguments[0], pick))
    return entries if origin is list else tuple(entries)


def made(kind: Any, pick: Pick) -> Any:
    """An instance of a dataclass; fields that are not of the file stay as they are."""
    if kind in NOTATIONS:
        return NOTATIONS[kind](pick)
    values = {}
    for one in dataclasses.fields(kind):
        said = one.metadata.get("kept")
        if one.name not in ("starts", "version") and not (said and said.absent):
            values[one.name] = of(hint_of(kind, one.name), pick)
    return kind(**values)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1 << 30))
def test_what_is_written_is_read_back(kind: Any, seed: int) -> None:
    value = made(kind, random.Random(seed))
    text = json.dumps(to_data(value), allow_nan=False)
    assert from_data(kind, json.loads(text)) == value
    assert json.dumps(to_data(from_data(kind, json.loads(text)))) == text


@pytest.mark.few(14)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1 << 30))
def test_mutants_are_read_or_refused_by_name(kind: Any, seed: int) -> None:
    pick = random.Random(seed)
    mutant = mutated_data(json.loads(json.dumps(to_data(made(kind, pick)))), pick)
    with contextlib.suppress(SchemaError, AutoparError):
        assert isinstance(from_data(kind, mutant), kind)


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
        fields.form_of(complex)
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
