"""Bad input gets a named error that says what is wrong, where, and what to do."""

from __future__ import annotations

import copy
import functools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar import Options
from autopar.errors import AutoparError, ClusterError, ConstraintError, InfeasibleError, InputError, PlanError
from tests.capture.equal import SGD

X, Y = torch.randn(8, 8), torch.arange(8)


def mlp(hidden: int = 16, out: int = 8) -> nn.Module:
    return nn.Sequential(nn.Linear(8, hidden), nn.ReLU(), nn.Linear(hidden, out))


def build(model: Any = None, cluster: Any = 2, inputs: Any = (X, Y), **others: Any) -> autopar.Program:
    cluster = autopar.ClusterSpec.local(cluster) if type(cluster) is int else cluster
    given = {"loss_fn": F.cross_entropy, "optimizer": SGD, **others}
    return autopar.compile(mlp() if model is None else model, cluster, inputs, **given)


def message(kind: type[AutoparError], attempt: Callable[[], Any]) -> str:
    with pytest.raises(kind) as caught:
        attempt()
    assert type(caught.value) is kind
    return str(caught.value)


# --- model, inputs, loss, optimizer --------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [lambda x: x, nn.Linear, "gpt2"], ids=["function", "class", "name"])
def test_a_model_that_is_no_module(model: Any) -> None:
    assert "model must be a torch.nn.Module, not" in message(InputError, lambda: build(model))


def test_a_number_beside_the_loss() -> None:
    text = message(InputError, lambda: build(loss_fn=lambda out, y: (out.sum() + y.sum(), {"mean": out.mean().item()})))
    assert (
        "loss_fn(…)[1]['mean'] is a number that item() gave of a tensor: beside the loss a step gives tensors" in text
    )


def test_a_loss_that_is_a_class() -> None:
    text = message(InputError, lambda: build(loss_fn=nn.CrossEntropyLoss))
    assert "loss_fn is the class CrossEntropyLoss; pass one of it, such as CrossEntropyLoss()" in text


@pytest.mark.parametrize(
    ("inputs", "says"),
    [
        ((Y,), "missing a required argument: 'input'"),
        ((X, X, Y), "got 3 positional inputs, 1 of them for loss_fn (too many positional arguments)"),
        ({"inpt": X, "target": Y}, "missing a required argument: 'input'"),
        ((), "got 0 positional inputs"),
        ("text", "must be a tuple of args or a dict of kwargs, not str"),
        ((3, 4), "hold no tensor"),
        ((X.numpy(), Y), "is a numpy array; make it a tensor with torch.from_numpy"),
    ],
    ids=["missing", "surplus", "wrong key", "empty", "text", "numbers", "numpy"],
)
def test_example_inputs_that_do_not_match_forward(inputs: Any, says: str) -> None:
    text = message(InputError, lambda: build(inputs=inputs))
    assert says in text
    if "argument" in says:
        assert "Sequential.forward(input)" in text


@pytest.mark.parametrize(
    "inputs", [(X, Y), {"input": X, "target": Y}, {"inpt": X, "target": Y}], ids=["args", "kwargs", "both"]
)
def test_a_batch_with_more_than_forward_takes_asks_for_the_loss(inputs: Any) -> None:
    text = message(InputError, lambda: build(inputs=inputs, loss_fn=None))
    assert "Sequential.forward(input)" in text
    assert "did you forget loss_fn=?" in text
    assert "forget" not in message(InputError, lambda: build(inputs={}, loss_fn=None))
    assert "forget" not in message(InputError, lambda: build(inputs=(X, X, Y)))


@pytest.mark.parametrize(
    ("inputs", "says"),
    [
        ({"input": X, "y": Y, "z": Y}, "does not take (y, z): too many positional arguments"),
        ({"input": X}, "does not take (there is none): missing a required argument: 'target'"),
    ],
)
def test_targets_that_the_loss_cannot_be_called_with(inputs: Any, says: str) -> None:
    def loss(out: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(out, target)

    text = message(InputError, lambda: build(inputs=inputs, loss_fn=loss))
    assert text.startswith("loss_fn(out")
    assert says in text


def test_optional_targets_of_a_loss_of_ones_own_are_allowed() -> None:
    def loss(out: Tensor, y: Tensor, weight: Tensor | None = None) -> Tensor:
        return (F.cross_entropy(out, y, reduction="none") * (1.0 if weight is None else weight)).mean()

    assert build(loss_fn=loss).request.targets == 1
    assert build(inputs=(X, Y, torch.rand(8)), loss_fn=loss).request.targets == 2


@pytest.mark.parametrize(
    ("loss_fn", "says"),
    [
        ("mse", "loss_fn must be callable (output, *targets)"),
        (
            lambda o, t: o,
            "must return a scalar tensor, or (scalar, what the step is to give beside it), it returned a tensor",
        ),
    ],
    ids=["name", "no scalar"],
)
def test_a_loss_that_is_none(loss_fn: Any, says: str) -> None:
    assert says in message(InputError, lambda: build(loss_fn=loss_fn))


def test_a_factory_that_no_program_could_be_saved_with_is_told_at_once() -> None:
    held = torch.ones(1)
    with pytest.warns(UserWarning, match=r"cannot be saved: the optimizer factory .* uses held, which is a Tensor"):
        autopar.compile(
            nn.Linear(4, 1),
            autopar.ClusterSpec.local(1),
            (torch.randn(4, 4), torch.randn(4, 1)),
            loss_fn=nn.functional.mse_loss,
            optimizer=lambda params: torch.optim.SGD(params, lr=held.item()),
        )


def test_an_optimizer_instance_instead_of_a_factory() -> None:
    model = mlp()
    text = message(InputError, lambda: build(model, optimizer=torch.optim.AdamW(model.parameters())))
    assert "pass functools.partial(torch.optim.AdamW, lr=…)" in text


@pytest.mark.parametrize(
    ("optimizer", "says"),
    [("adamw", "must be a factory"), (functools.partial(torch.optim.SGD, lrr=1), "unexpected keyword argument 'lrr'")],
)
def test_a_factory_that_makes_no_optimizer(optimizer: Any, says: str) -> None:
    assert says in message(InputError, lambda: build(optimizer=optimizer))


# --- batch, mesh, options, cluster -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "options", "says"),
    [
        (16, {"mesh": {"dp": 16}}, "batch of 8 (input 0) has fewer rows than dp=16"),
        (2, {"microbatches": 3}, "batch of 8 (input 0) is not divisible by microbatches=3; choose a divisor of 8"),
        (4, {"microbatches": 4, "mesh": {"dp": 4}}, "has fewer rows than dp=4 times microbatches=4"),
        (16, {"strategy": "dp"}, "has fewer rows than dp=16"),
    ],
)
def test_a_batch_that_cannot_be_cut(ranks: int, options: dict, says: str) -> None:
    assert says in message(InputError, lambda: build(cluster=ranks, options=Options(**options)))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"axes": {"dp": 2, "tp": 2}, "pp": 1}, "dp=2, tp=2 takes 4 ranks, the cluster has 8; choose other sizes"),
        (
            {"axes": {"dp": 2, "tp": 1}, "pp": 2},
            "dp=2, tp=1, pp=2 takes 4 ranks, the cluster has 8; choose other sizes",
        ),
    ],
)
def test_sizes_that_leave_ranks_over(options: dict[str, Any], says: str) -> None:
    assert message(InputError, lambda: build(cluster=8, options=Options(**options))) == says


def test_a_mesh_that_does_not_multiply_to_the_ranks() -> None:
    text = message(InputError, lambda: build(cluster=4, options=Options(mesh={"dp": 3})))
    assert text == "Options.mesh {'dp': 3} has 3 ranks, the cluster has 4; make the axis sizes multiply to 4"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"microbatches": 0}, "Options.microbatches must be a whole number from 1 to 1048576, got 0"),
        ({"microbatches": "2"}, "Options.microbatches must be a whole number from 1 to 1048576, got '2'"),
        ({"strategy": "ddp"}, "Options.strategy must be one of auto, dp,"),
        ({"memory_fraction": 2.0}, "Options.memory_fraction must be a number in (0, 1], got 2.0"),
        ({"memory_bytes": -1.0}, "Options.memory_bytes must be a positive number, got -1.0"),
        ({"solver_time_limit_s": 0.0}, "must be a positive number of at most 1e+09, got 0.0"),
        ({"mesh": {"dp": 0}}, "Options.mesh.dp must be a whole number from 1 to 1048576, got 0"),
        ({"mesh": {"dp": "two"}}, "Options.mesh.dp must be a whole number from 1 to 1048576, got 'two'"),
        ({"mesh": [2, 2]}, "Options.mesh must be a mapping, got [2, 2]"),
        ({"constraints": ["*.weight"]}, "Options.constraints must be a mapping, got ['*.weight']"),
    ],
    ids=str,
)
def test_options_that_cannot_be(options: dict, says: str) -> None:
    assert says in message(InputError, lambda: Options(**options))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"strategy": "zeor3"}, "got 'zeor3'; did you mean 'zero3'?"),
        ({"precision": "bfloat16"}, "got 'bfloat16'; did you mean 'bf16'?"),
        ({"recompute": "slective"}, "did you mean 'selective'?"),
        ({"compiler": "induktor"}, "did you mean 'inductor'?"),
    ],
)
def test_a_value_that_is_much_like_one_that_may_be(options: dict, says: str) -> None:
    assert message(InputError, lambda: Options(**options)).endswith(says)


def test_values_that_are_like_none_are_not_guessed_at() -> None:
    for value in ("qqq", 3, "z" * 1000):
        assert "did you mean" not in message(InputError, lambda value=value: Options(strategy=value))


def test_a_schedule_that_is_much_like_one_there_is() -> None:
    text = message(InputError, lambda: build(options=Options(pp=2, schedule="1f1-b")))
    assert text.endswith("did you mean '1f1b'?")


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: Options(micro_batches=2), "argument 'micro_batches'; did you mean 'microbatches'?"),  # type: ignore[call-arg]
        (
            lambda: build(optimiser=SGD),
            "compile() got an unexpected keyword argument 'optimiser'; did you mean 'optimizer'?",
        ),
        (lambda: build(qqq=SGD), "compile() got an unexpected keyword argument 'qqq'"),
    ],
)
def test_keywords_that_are_not_taken_name_the_nearest(call: Callable[[], Any], says: str) -> None:
    with pytest.raises(TypeError) as caught:
        call()
    assert str(caught.value).endswith(says)


def test_options_and_plans_of_the_wrong_type() -> None:
    assert "must be autopar.Options(…), not dict" in message(InputError, lambda: build(options={"microbatches": 2}))
    assert "must be an autopar.Plan or the path" in message(InputError, lambda: build(plan={"stages": []}))


@pytest.mark.parametrize(
    ("dims", "says"),
    [
        ({"ids": 1}, "names 'ids'; inputs are 0, 1"),
        ([5], "dim 5 of input 0, whose shape is (8, 8)"),
        ([0, 0, 0], "3 entries for 2"),
    ],
    ids=["name", "dim", "too many"],
)
def test_batch_dims_that_do_not_exist(dims: Any, says: str) -> None:
    assert says in message(InputError, lambda: build(options=Options(batch_dims=dims)))


def test_a_cluster_of_the_wrong_type_an_unknown_preset_a_missing_file() -> None:
    with pytest.raises(InputError, match="cluster must be a ClusterSpec, a preset's name or a file, not float"):
        build(cluster=4.0)
    unknown = message(ClusterError, lambda: build(cluster="dgx-a1000"))
    assert re.search("unknown cluster preset 'dgx-a1000'; known: .*dgx-a100", unknown)
    assert "cannot read the cluster file" in message(ClusterError, lambda: build(cluster="/missing/cluster.yaml"))


# --- constraints, memory -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "spec", "says"),
    [
        ("layers.*.weight", "[@dp, .]", "matches no parameter and no value; parameters are 0.weight, 0.bias, 2.weight"),
        ("2.weight", "[@dp, .]", "does not fit 2.weight of shape (7, 16) on mesh dp=2"),
        ("0.weight", "[@dp]", "one entry per dim"),
        ("0.weight", "[@tp, .]", "uses axis tp, the mesh is dp=2; name its axes or set Options.mesh"),
        ("0.weight", "dp on dim 0", "is no spec; write for example"),
    ],
    ids=["matches nothing", "does not divide", "dims", "axis", "syntax"],
)
def test_constraints_that_cannot_be_met(pattern: str, spec: str, says: str) -> None:
    options = Options(mesh={"dp": 2}, constraints={pattern: spec})
    assert says in message(ConstraintError, lambda: build(mlp(out=7), inputs=(X, Y % 7), options=options))


def test_what_does_not_fit_says_what_is_short_by_how_much_and_what_would_fit() -> None:
    text = message(InfeasibleError, lambda: build(options=Options(memory_bytes=800)))
    short = re.search(
        r"nothing fits in 800 B per rank: the smallest plan \(.*\) needs ([\d.]+) kB, ([\d.]+) (k?B) too much: parameters "
        r"([\d.]+) B, .*\(in all: parameters 1.12 kB, .*\)\nWhat would do:\n(?:  - .*\n)*  - (\d+) ranks instead of 2: .* a "
        r"step, ([\d.]+) B per rank",
        text,
    )
    assert short, text
    need, over = float(short[1]) * 1e3, float(short[2]) * (1e3 if short[3] == "kB" else 1)
    assert need - over == pytest.approx(800, abs=10)
    assert float(short[6]) <= 800
    assert build(options=Options(memory_bytes=need * 3)).plan.ranks == 2


# --- plans ------------------------------------------------------------------------------------------------------------


@functools.cache
def program() -> autopar.Program:
    return build(options=Options(mesh={"dp": 2}))


def replayed(change: Callable[[dict], Any], path: Path) -> str:
    data = copy.deepcopy(program().plan.to_dict())
    change(data)
    path.write_text(json.dumps(data))
    return message(PlanError, lambda: build(plan=path))


def _first(data: dict, kind: str) -> tuple[dict, str]:
    table = next(iter(data["stages"][0]["templates"].values()))[kind]
    return table, next(name for name in table if "linear" in name or kind == "specs")


def _set(kind: str, value: Any) -> Callable[[dict], None]:
    def change(data: dict) -> None:
        table, name = _first(data, kind)
        table[name] = value

    return change


def _drop(kind: str) -> Callable[[dict], None]:
    def change(data: dict) -> None:
        table, name = _first(data, kind)
        del table[name]

    return change


def _stage(**changes: Any) -> Callable[[dict], None]:
    return lambda data: data["stages"][0].update(changes)


def _weight(storage: str, optimizer: str) -> Callable[[dict], None]:
    row = {"storage": storage, "optimizer": optimizer}
    return lambda data: data["stages"][0]["parameters"].update({"0.weight": row})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda d: d.pop("stages"), "'stages' is missing"),
        (lambda d: d.update(stages=3), "must be a JSON object with a list of stages"),
        (lambda d: d.update(stages=[]), "must be a JSON object with a list of stages"),
        (lambda d: d.update(autopar_plan=99), "of format 99, this autopar reads"),
        (lambda d: d.update(ranks="two"), "ranks must be a whole number from 1 to 1048576, got 'two'"),
        (_set("strategies", "zz=b"), "uses zz, the mesh has dp"),
        (_set("strategies", "dp=zz"), "does not fit the rule"),
        (_set("strategies", "everything"), "'everything' is no strategy; write axis=factor"),
        (_set("strategies", 5), "must be printable text on one line, of at most 4096 characters, got 5"),
        (_set("specs", "[@zz, .]"), "[@zz, .] uses axis zz, the mesh is dp=2"),
        (_set("specs", "[@dp]"), "does not fit a tensor of shape"),
        (_set("specs", "@@"), "is no spec; write for example"),
        (_drop("specs"), "the plan says nothing about"),
        (_drop("strategies"), "the plan says nothing about"),
        (lambda d: d["stages"][0]["parameters"].pop("0.weight"), "the plan says nothing about 0.weight"),
        (_weight("[@dp, .]", "[., .]"), "parameter 0.weight: the optimizer state [., .] must be sharded at least like"),
        (_stage(mesh={"dp": 3}), "its meshes have 3 ranks in all, it says 2"),
        (_stage(calls=[0, 7]), "must hold each of the program's 5 once"),
        (_stage(calls=[0]), "the plan is corrupt: stages[0].calls must be a list of 2 entries, got [0]"),
    ],
)
def test_a_corrupt_plan_names_what_is_wrong_in_it(change: Callable[[dict], Any], says: str, tmp_path: Path) -> None:
    assert says in replayed(change, tmp_path / "plan.json")


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", "null", '"plan"'])
def test_a_file_that_is_no_plan(text: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    assert re.search("is no JSON|must be a JSON object", message(PlanError, lambda: autopar.Plan.load(path)))


def test_a_truncated_or_missing_plan(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    program().plan.save(path)
    path.write_text(path.read_text()[:200])
    assert f"{path} is no JSON" in message(PlanError, lambda: build(plan=path))
    assert "cannot read the plan" in message(PlanError, lambda: build(plan=tmp_path / "missing.json"))


def test_a_plan_for_another_model_cluster_size_or_microbatches() -> None:
    plan = program().plan
    assert "for another model" in message(PlanError, lambda: build(mlp(32), plan=plan))
    assert "for another model" in message(PlanError, lambda: build(inputs=(X[:4], Y[:4]), plan=plan))
    assert "is for 2 ranks, the cluster has 4" in message(PlanError, lambda: build(cluster=4, plan=plan))
    text = message(PlanError, lambda: build(plan=plan, options=Options(microbatches=2)))
    assert "this plan has 1 microbatches, Options ask for 2" in text


# --- running --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batches", "says"),
    [
        ([(X,)], "the batch must have 2 entries as in the example inputs, it has 1 entries"),
        ([{"input": X, "target": Y}], "the batch must have 2 entries as in the example inputs, it has a dict"),
        ([(X, 3)], "the batch[1] must be a tensor as in the example inputs, it is 3"),
        ([(X[:6], Y[:6])], "input 0 has shape (6, 8), the program was compiled for (8, 8)"),
        ([], "run needs at least one batch"),
        (3, "run needs batches built like the example inputs, not int"),
    ],
    ids=["short", "dict", "number", "shape", "none", "int"],
)
def test_batches_that_are_built_differently_from_the_example_inputs(batches: Any, says: str) -> None:
    assert says in message(InputError, lambda: program().run(batches))


def test_a_dict_batch_names_the_keys_and_constants_that_differ() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(8, 8)

        def forward(self, x: Tensor, scale: float) -> Tensor:
            return self.lin(x) * scale

    one = build(Scaled(), inputs={"x": X, "scale": 2.0, "y": Y})
    assert "the batch lacks 'x'" in message(InputError, lambda: one.run([{"scale": 2.0, "y": Y}]))
    assert "the batch has the surplus 'z'" in message(
        InputError, lambda: one.run([{"x": X, "scale": 2.0, "y": Y, "z": X}])
    )
    text = message(InputError, lambda: one.run([{"x": X, "scale": 3.0, "y": Y}]))
    assert "the batch['scale'] is a constant of the program: it was 2.0 in the example inputs, now it is 3.0" in text


def test_a_rank_that_does_not_exist_and_a_reference_that_is_no_model() -> None:
    assert "rank 9 does not exist, the program has ranks 0 to 1" in message(InputError, lambda: program().source(9))
    assert "needs the eager model" in message(InputError, lambda: autopar.verify(program(), 3, (X, Y)))  # type: ignore[arg-type]


def test_every_error_is_an_autopar_error_and_says_something() -> None:
    for kind in (InputError, PlanError, ClusterError, ConstraintError, InfeasibleError, autopar.CaptureError):
        assert issubclass(kind, AutoparError)
        assert kind.__doc__
