"""A program under a change is the one that `compile` gives from scratch, and its difference adds up by cause."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.cluster.spec import resized, with_memory
from autopar.errors import Change, ClusterError, ConstraintError, InfeasibleError, InputError, MemoryShortage
from autopar.options import Options
from autopar.passes.shard.meshes import candidate_meshes
from autopar.what_if.answer import compared, no_fit
from autopar.what_if.changes import axes_of, changed_cluster, changes_of, pins_of, words_of
from autopar.what_if.difference import HIDDEN
from tests.zoo.models import BY_NAME
from tests.zoo.programs import compiled_zoo

FOUR = autopar.ClusterSpec.local(4)
X, Y = torch.randn(8, 16, dtype=torch.float64), torch.randn(8, 16, dtype=torch.float64)


def mlp(cluster: autopar.ClusterSpec = FOUR, **options: Any) -> autopar.Program:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)).double()
    adam = functools.partial(torch.optim.Adam, lr=1e-2)
    asked = {"loss_fn": nn.functional.mse_loss, "optimizer": adam, "options": Options(explain_s=0.0, **options)}
    return autopar.compile(model, cluster, (X, Y), **asked)


@functools.cache
def program() -> autopar.Program:
    return mlp()


def solved(answer: Any) -> autopar.Program:
    assert answer.program is not None, answer.sentence
    found: autopar.Program = answer.program
    return found


CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "pin": ({"pin": {"0": "[@tp, .]"}}, {"constraints": {"0.weight": "[@tp, .]"}}),
    "axis": ({"tp": 4}, {"axes": {"tp": 4}}),
    "axes and stages": ({"mesh": {"dp": 2, "pp": 2}}, {"axes": {"dp": 2}, "pp": 2}),
    "strategy": ({"strategy": "fsdp"}, {"strategy": "zero3"}),
}


@pytest.mark.few(2)
@pytest.mark.parametrize(("changes", "options"), CHANGES.values(), ids=CHANGES)
def test_the_answer_is_what_compile_gives_from_scratch(changes: dict[str, Any], options: dict[str, Any]) -> None:
    found, fresh = solved(program().what_if(**changes)), mlp(**options)
    assert (found.plan, found.predicted) == (fresh.plan, fresh.predicted)


WIDE: list[dict[str, Any]] = [{"tp": 2}, {"strategy": "fsdp"}, {"nodes": 2}, {"memory_gb": 4}, {"pp": 2}, {"dp": 2}]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gpt2", "vit", "moe"])
@pytest.mark.parametrize("changes", WIDE, ids=str)
def test_the_answer_is_what_compile_gives_on_other_models(name: str, changes: dict[str, Any]) -> None:
    found = solved(compiled_zoo(BY_NAME[name], 4).what_if(**changes))
    request = found.request
    fresh = compiled_zoo(BY_NAME[name], request.cluster, options=request.options)
    assert (found.plan, found.predicted) == (fresh.plan, fresh.predicted)


def test_a_pinned_program_computes_what_eager_does() -> None:
    found = solved(program().what_if(pin={"0": "[@tp, .]", "2.weight": "[., @tp]"}))
    rests = found.plan.stages[0].parameters
    assert (str(rests["0.weight"].storage), str(rests["2.weight"].storage)) == ("[@tp, .]", "[., @tp]")
    verified = autopar.verify(found, found.model, (X, Y))
    assert verified.ok
    assert verified.max_error <= 1e-9


def test_a_pin_rules_out_meshes_without_its_axis_and_no_others() -> None:
    assert "tp" in mlp(constraints={"0.weight": "[@tp, .]"}).mesh
    with pytest.raises(ConstraintError, match=r"uses axis ep.*possible for 0.weight are .*\[@dp, \.\]"):
        program().what_if(pin={"0.weight": "[@ep, .]"})


@pytest.mark.parametrize(
    ("pin", "says"),
    [
        ({"3.weight": "[@tp, .]"}, "matches no parameter and no value"),
        ({"0": "[., ., @tp]"}, r"no parameter of this module has 3 dims.*0.weight \[32, 16\], 0.bias \[32\]"),
        ({"0.bias": "[@tp, .]"}, r"does not fit 0.bias of shape \(32,\).*possible are \[\.\], \[@"),
        ({"0.weight": "@tp on rows"}, "is no spec; write for example"),
    ],
    ids=["name", "module", "dims", "text"],
)
def test_pins_that_cannot_be_are_refused_by_name(pin: dict[str, str], says: str) -> None:
    with pytest.raises(ConstraintError, match=says):
        program().what_if(pin=pin)


def test_seconds_and_bytes_differ_by_cause() -> None:
    found = program().what_if(strategy="fsdp")
    difference, facts = found.difference, found.facts()
    assert difference is not None
    (before_s, after_s), (before, after) = difference.step_time_s, difference.peak_bytes
    assert after_s == solved(found).predicted.step_time_s > before_s == program().predicted.step_time_s
    own = {cause: s for cause, s in difference.seconds.items() if cause != HIDDEN}
    assert sum(own.values()) == pytest.approx(after_s - before_s, rel=1e-9)
    assert sum(difference.nbytes.values()) == pytest.approx(after - before, abs=0.5)
    most = max(own, key=lambda cause: own[cause])
    assert found.sentence.startswith("strategy=fsdp: ")
    assert "% slower" in found.sentence
    assert found.sentence.split(", +")[0].endswith(most) or f"{most} (most of all " in found.sentence
    assert json.loads(json.dumps(facts)) == facts
    assert facts["step_time_s"] == [before_s, after_s]
    assert {row["what"] for row in facts["plan"]} >= {"0.weight"}
    assert found.sentence in found.report()


def test_the_other_way_round_is_the_difference_negated() -> None:
    there = compared(program(), "best", "tp=4", program().compile_again, program().with_plan).difference
    back = compared(program(), "tp=4", "best", program().compile_again, program().with_plan).difference
    assert there is not None
    assert back is not None
    assert back.step_time_s == there.step_time_s[::-1]
    assert back.seconds == pytest.approx({cause: -s for cause, s in there.seconds.items()})


def test_a_saved_plan_is_compared(tmp_path: Any) -> None:
    solved(program().what_if(strategy="zero3")).plan.save(tmp_path / "plan.json")
    answer = compared(program(), "best", str(tmp_path / "plan.json"), program().compile_again, program().with_plan)
    assert solved(answer).plan.origin == "zero3"


@pytest.mark.slow
def test_what_does_not_fit_says_how_much_would_do() -> None:
    answer = program().what_if(memory_gb=8e-6)
    assert answer.program is None
    assert answer.refused is not None
    assert "does not fit: short by" in answer.sentence
    assert answer.report().startswith(answer.sentence)
    assert answer.facts()["no_fit"]["short_bytes"] == pytest.approx(answer.refused.least_bytes - 8e3)
    least = answer.refused.least_bytes
    assert mlp(with_memory(FOUR, 1.01 * least)).plan.ranks == 4
    with pytest.raises(InfeasibleError):
        mlp(with_memory(FOUR, 0.97 * least))


def test_what_a_step_adds_up_with_is_changed_too() -> None:
    found = solved(program().what_if(compensated_sums=True, microbatches=2))
    assert found.request.update.compensated
    assert found.setting.compensated


def test_entries_follow_the_plan_and_have_options_of_their_own() -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)).double()
    entries = {"evaluate": autopar.Entry()}
    both = autopar.compile(
        model, FOUR, (X, Y), loss_fn=nn.functional.mse_loss, optimizer=torch.optim.SGD, entries=entries
    )
    assert solved(both.what_if(tp=4)).entries["evaluate"].mesh == {"tp": 4}
    with pytest.raises(InputError, match="precision would be of the entries evaluate too"):
        both.what_if(precision="bf16")


def test_nodes_and_memory_are_of_the_cluster() -> None:
    assert changed_cluster(FOUR, {"nodes": 2}) == resized(FOUR, 8)
    assert changed_cluster(FOUR, {"memory_gb": 4}) == with_memory(FOUR, 4e9)
    assert solved(program().what_if(memory_gb=4)).request.cluster.device(0).memory_bytes == 4e9
    with pytest.raises(ClusterError):
        program().what_if(cluster="no such cluster")


@pytest.mark.parametrize(
    "changes",
    [
        {"tp": 4, "microbatches": 8},
        {"strategy": "fsdp"},
        {"memory_gb": 24},
        {"nodes": 16, "pin": {"layers.*.up.weight": "[@tp, .]", "*.down.weight": "[., @tp]"}},
        {"overlap": False, "precision": None},
    ],
    ids=str,
)
def test_changes_are_said_in_words(changes: dict[str, Any]) -> None:
    assert changes_of(words_of(changes)) == changes


@pytest.mark.parametrize(
    ("ask", "says"),
    [
        (lambda: changes_of("tp"), "is no change"),
        (lambda: axes_of("tq=4"), "dp, ep, cp, tp, pp, and no tq"),
        (lambda: axes_of("tp=four"), "tp is a whole number of ranks"),
        (lambda: pins_of(["[@tp, .]"]), "--pin takes NAME=SPEC"),
        (lambda: program().what_if(), "needs a change"),
        (lambda: program().what_if(microbatch=2), "no change named 'microbatch'.*did you mean 'microbatches'"),
        (lambda: program().what_if(memory_gb=0), "memory_gb is the memory of a device"),
        (lambda: program().what_if(tp=3), "tp=3 takes a multiple of 3 ranks, at least 3, the cluster has 4"),
        (lambda: program().what_if(tp=4, pp=2), "tp=4, pp=2 takes a multiple of 4 ranks, at least 8"),
        (lambda: program().what_if(tp=2, strategy="fsdp"), "shards the batch over every axis"),
        (lambda: Options(axes={"tp": 2}, mesh={"dp": 4}), "leave one of them out"),
    ],
)
def test_what_is_no_change_is_refused_by_name(ask: Any, says: str) -> None:
    with pytest.raises(InputError, match=says):
        ask()


@pytest.mark.parametrize(
    ("axes", "ranks", "meshes"),
    [
        ({"tp": 4}, 16, ["dp=4×tp=4"]),
        ({"tp": 1}, 16, ["dp=16"]),
        ({"dp": 4}, 8, ["dp=4×tp=2"]),
        ({"dp": 1}, 8, ["tp=8"]),
        ({"dp": 2, "cp": 3}, 12, ["dp=2×cp=3×tp=2"]),
        ({"dp": 4, "tp": 2}, 8, ["dp=4×tp=2"]),
        ({"dp": 4, "tp": 2}, 16, []),
        ({"ep": 4}, 16, ["dp=4×ep=4", "ep=4×tp=4", "dp=2×ep=4×tp=2"]),
    ],
)
def test_axes_have_the_sizes_that_are_asked_for(axes: dict[str, int], ranks: int, meshes: list[str]) -> None:
    cluster = autopar.ClusterSpec.preset("dgx-h100", nodes=2)
    assert list(map(str, candidate_meshes(cluster, Options(axes=axes), ranks))) == meshes


def test_the_nearest_change_that_would_do_is_said() -> None:
    error = InfeasibleError("nothing fits in 5 GB per rank")
    error.shortage = MemoryShortage(8, limit_bytes=5e9, needed_bytes=7e9, plan="zero3 on dp=8")
    error.alternatives = (
        Change("ranks", "16 ranks", Options(), FOUR, 8, 1.0, 4e9, "16 ranks instead of 8: 1 s a step"),
    )
    answer = no_fit(error, FOUR, Options(memory_bytes=5e9))
    assert answer.sentence == (
        "does not fit: short by 2 GB of 5 GB; devices of about 7 GB would do; or 16 ranks instead of 8: 1 s a step"
    )
    with pytest.raises(InfeasibleError, match="no choice is left"):
        no_fit(InfeasibleError("no choice is left"), FOUR, Options())
