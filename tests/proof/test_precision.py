"""Mixed precision: float64 says that the rewriting is right; what stays in float32, what travels and what it takes."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.codegen import in_process as running
from autopar.ir.lines import Convert
from autopar.ir.lowered import LoweredTemplate
from autopar.passes.rules.widening import wide_gradients
from autopar.runtime.kernels import ops
from tests.passes.recompute.recomputed import with_policy
from tests.proof import test_processes as processes
from tests.proof.precise import emitted, without_dropout
from tests.proof.test_memory_measured import PLANS, WIDE, assert_kept
from tests.zoo.models import BY_NAME, MODELS, ZooModel
from tests.zoo.programs import compiled_zoo

SGD = functools.partial(torch.optim.SGD, lr=0.5)
RUNS = ("dp", "zero3", "megatron", "1f1b")
REDUCTIONS = ("all_reduce", "reduce_scatter")


@functools.lru_cache(maxsize=4)
def compiled(
    zoo: ZooModel, plan: str = "dp", ranks: int = 2, precision: str | None = "bf16", microbatches: int | None = None
) -> autopar.Program:
    options = dataclasses.replace(PLANS[plan], precision=precision, microbatches=microbatches, coupled="per-microbatch")
    if options.mesh is not None:
        options = dataclasses.replace(options, mesh={"dp": ranks // 2, "tp": 2})
    if ranks == 1:
        options = autopar.Options(precision=precision, microbatches=microbatches, coupled="per-microbatch")
    return compiled_zoo(zoo, ranks, model=without_dropout(zoo.make()), options=options)


def line_program(ranks: int, microbatches: int = 1, precision: str | None = "bf16") -> autopar.Program:
    """One weight w = 0 and y = w x: its gradient is the sum of x."""

    class Line(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Linear(1, 1, bias=False)
            nn.init.zeros_(self.w.weight)

        def forward(self, x: Tensor) -> Tensor:
            return self.w(x)

    return autopar.compile(
        Line(),
        autopar.ClusterSpec.local(ranks),
        (ADDENDS, ADDENDS),
        loss_fn=lambda y, t: y.sum(),
        optimizer=functools.partial(torch.optim.SGD, lr=1.0),
        options=autopar.Options(
            strategy="dp", microbatches=microbatches, precision=precision, coupled="per-microbatch"
        ),
    )


ADDENDS = torch.tensor([[256.0], [1.0], [1.0], [1.0]])
"""Numbers of bfloat16 whose sum, 259, is none: it rounds to 260."""


# --- the rewriting is right: in float64 casts round nothing


@pytest.mark.few(1)
@pytest.mark.parametrize("zoo", MODELS, ids=str)
def test_every_model_equals_the_eager_one_when_nothing_rounds(zoo: ZooModel) -> None:
    program = compiled_zoo(zoo, 2, options=autopar.Options(precision="bf16"))
    result = autopar.verify(program, zoo.make(), zoo.batch())
    assert result.ok, max(result.errors.items(), key=lambda e: e[1])
    assert result.max_error <= 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ["llama", "t5", "resnet"])
def test_random_plans_equal_the_eager_model_when_nothing_rounds(name: str, seed: int) -> None:
    zoo = BY_NAME[name]
    program = compiled(zoo, ranks=4, microbatches=2)
    program = program.with_plan(autopar.random_plan(program, seed))
    result = autopar.verify(program, without_dropout(zoo.make()), zoo.batch())
    assert result.ok, max(result.errors.items(), key=lambda e: e[1])


@pytest.mark.few(1)
@pytest.mark.parametrize("policy", ["selective", "full"])
def test_recompute_makes_casts_again(policy: str) -> None:
    zoo = BY_NAME["llama"]
    program = compiled(zoo, "zero3")
    again = program.with_plan(with_policy(program, program.plan, policy))
    assert autopar.verify(again, zoo.make(), zoo.batch()).ok
    one, two = emitted(program, zoo.batch(), 2), emitted(again, zoo.batch(), 2)
    assert torch.equal(one.losses, two.losses)
    assert all(torch.equal(one.parameters[n], two.parameters[n]) for n in one.parameters)


def test_inference_in_16_bits_equals_the_eager_model_when_nothing_rounds() -> None:
    zoo = BY_NAME["bert"]
    batch = zoo.inference_batch()
    options = autopar.Options(precision="bf16")
    program = autopar.compile(zoo.make().eval(), autopar.ClusterSpec.local(2), batch, options=options)
    assert autopar.verify(program, zoo.make().eval(), batch).ok


# --- what stays in float32


def test_parameters_gradients_and_optimizer_state_are_float32_on_every_rank() -> None:
    zoo = BY_NAME["llama"]
    program = compiled(zoo, "zero3")

    def body(session: Any) -> set[torch.dtype]:
        session.train_step(program.leaves(zoo.batch()))
        held = [*session.rt.params.values(), *session.grads.values(), *session.rt.buffers.values()]
        state = [
            v
            for one in session.updater.optimizers
            for s in one.state.values()
            for v in s.values()
            if isinstance(v, Tensor)
        ]
        return {t.dtype for t in (*held, *state) if t.is_floating_point()}

    for found in program.on_ranks(body):
        assert found == {torch.float32}


@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 1), (2, 1), (2, 2), (4, 1), (1, 4)])
def test_gradients_of_ranks_and_microbatches_are_added_in_float32(ranks: int, microbatches: int) -> None:
    """256 + 1 + 1 + 1 is 259 where the addends meet in float32, 256 to 260 where a product or a sum rounds."""
    run = line_program(ranks, microbatches).run([(ADDENDS, ADDENDS)], steps=1)
    assert float(run.losses[0]) == 0.0
    exact = microbatches * ranks == 4
    assert (-float(run.state["w.weight"]) == 259.0) == exact
    assert abs(float(run.state["w.weight"]) + 259.0) <= 2.0


@pytest.mark.parametrize("names", [("bert",), pytest.param(("bert", "vit"), marks=pytest.mark.slow)])
def test_a_gradient_is_cast_before_it_is_reduced_whatever_the_plan(names: tuple[str, ...]) -> None:
    """No reduction of a value that only becomes a parameter's gradient is in 16 bits."""
    seen = 0
    for name in names:
        program = compiled(BY_NAME[name], ranks=4)
        for seed in range(2):
            plan = autopar.random_plan(program, seed)
            for stage in program.with_plan(plan).stages:
                for template in stage.templates.values():
                    seen += _reductions_are_wide(template, program)
    assert seen


def _reductions_are_wide(template: LoweredTemplate, program: autopar.Program) -> int:
    """Counts the reductions of parameter gradients inside a template's functions."""
    names, count = wide_gradients(program.ir.templates[template.name]), 0
    for function in template.functions:
        for line in function.lines:
            if isinstance(line, Convert) and line.step.kind in REDUCTIONS and line.node in names:
                assert line.types[0] is not None
                assert line.types[0].dtype == torch.float32, (template.name, line)
                count += 1
    return count


# --- what moves


def test_zero3_gathers_half_the_bytes_and_reduces_as_many() -> None:
    bytes_by = {}
    for precision in (None, "bf16"):
        program = compiled(WIDE[0], "zero3", precision=precision)
        totals = {"gather": 0.0, "gradient": 0.0}
        for c in program.account.collectives:
            kind = c.what.split()[0]
            totals[kind] = totals.get(kind, 0.0) + c.times * c.nbytes
        bytes_by[precision] = totals
    assert bytes_by["bf16"]["gather"] == bytes_by[None]["gather"] / 2 > 0
    assert bytes_by["bf16"]["gradient"] == bytes_by[None]["gradient"] > 0


def test_partial_sums_of_activations_travel_in_16_bits() -> None:
    """A column-parallel and a row-parallel linear: what they owe is reduced as it is computed, gradients back too."""

    class Mlp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(256), nn.Linear(256, 1024), nn.Linear(1024, 256)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(F.gelu(self.up(self.norm(x))))

    x = torch.randn(64, 16, 256)
    sharded = {"up.weight": "[@tp, .]", "down.weight": "[., @tp]"}
    program = autopar.compile(
        Mlp(),
        autopar.ClusterSpec.local(2),
        (x, x),
        loss_fn=F.mse_loss,
        options=autopar.Options(precision="bf16", mesh={"tp": 2}, constraints=sharded),
    )
    (stage,) = program.stages
    functions = [*stage.functions, *(f for t in stage.templates.values() for f in t.functions)]
    moved = [
        line.types[0]
        for f in functions
        for line in f.lines
        if isinstance(line, Convert) and line.step.kind in REDUCTIONS
    ]
    assert {t.dtype for t in moved if t is not None and len(t.shape) == 3} == {torch.bfloat16}


def test_products_are_priced_at_the_peak_of_their_dtype() -> None:
    """Products that an H100 is busy with for long take it about as much less as its tensor cores are faster."""
    with torch.device("meta"):
        model, x = nn.Sequential(nn.Linear(4096, 4096), nn.Linear(4096, 4096)), torch.zeros(16384, 4096)
    cluster = autopar.ClusterSpec.from_dict({"nodes": [{"count": 1, "device": "h100", "devices_per_node": 1}]})
    programs = [
        autopar.compile(model, cluster, (x, x), loss_fn=F.mse_loss, options=autopar.Options(precision=p))
        for p in (None, "bf16")
    ]
    span_s = [program.account.step.span_s for program in programs]
    assert span_s[1] < span_s[0] / 4


@pytest.mark.slow
@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("plan", ["dp", "zero3", "megatron", "1f1b", "zb-h1"])
def test_a_transformer_holds_what_was_predicted(plan: str, microbatches: int) -> None:
    program = compiled(WIDE[2], plan, microbatches=4 if plan in ("1f1b", "zb-h1") else microbatches)
    assert_kept(program, WIDE[2].batch(1))


@pytest.mark.few(1)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("name", ["recommender", "moe", "resnet", "t5"])
def test_small_networks_hold_what_was_predicted(name: str, precision: str) -> None:
    assert_kept(compiled(BY_NAME[name], "zero3", precision=precision), BY_NAME[name].batch(1))


def test_activations_take_half_the_room() -> None:
    """Wide activations over a small model: what is held for backward is 16 bits, norms included."""

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(32, 32)
            self.layers = nn.ModuleList(nn.Sequential(nn.RMSNorm(32), nn.Linear(32, 32), nn.SiLU()) for _ in range(6))

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for layer in self.layers:
                x = x + layer(x)
            return x

    x = torch.randn(512, 32)
    held = [
        autopar.compile(
            Deep(),
            autopar.ClusterSpec.local(1),
            (x, x),
            loss_fn=F.mse_loss,
            optimizer=SGD,
            options=autopar.Options(precision=precision),
        )
        .account.stages[0]
        .memory.actions["F"]
        .after
        for precision in (None, "bf16")
    ]
    assert held[1] <= 0.6 * held[0]


def test_dropout_masks_do_not_depend_on_the_dtype() -> None:
    x = torch.randn(64, 64)
    masks = [ops.dropout(x.to(d), 0.3, 7) == 0 for d in (torch.float64, torch.float32, torch.bfloat16, torch.float16)]
    assert all(torch.equal(masks[0], m) for m in masks)
    assert 0.2 < masks[0].double().mean() < 0.4


def test_rows_of_an_embedding_that_come_often_are_summed_in_float32() -> None:
    g, index = torch.ones(1000, 4, dtype=torch.bfloat16), torch.zeros(1000, dtype=torch.long)
    grad = ops.embedding_grad(g, index, 8, -1)
    assert grad.dtype == torch.bfloat16
    assert grad[0].tolist() == [1000.0] * 4  # bfloat16 alone stops at 256


# --- asking for it


def test_a_cluster_must_have_the_dtype_everywhere() -> None:
    zoo = BY_NAME["mlp"]
    nodes = [{"count": 1, "device": d, "devices_per_node": 1} for d in ("v100", "h100")]
    cluster = autopar.ClusterSpec.from_dict({"nodes": nodes})
    with pytest.raises(autopar.InputError, match=r"v100 has no bfloat16.*float64, float32, float16.*precision='fp16'"):
        compiled_zoo(zoo, cluster, options=autopar.Options(precision="bf16"))


def test_an_unknown_precision_is_refused() -> None:
    with pytest.raises(autopar.InputError, match="must be one of bf16, fp16, got 'int4'"):
        autopar.Options(precision="int4")


def test_a_plan_knows_its_precision() -> None:
    zoo = BY_NAME["mlp"]
    program = compiled(zoo)
    assert program.plan.precision == "bf16"
    assert autopar.Plan.from_dict(program.plan.to_dict()) == program.plan
    again = compiled_zoo(zoo, 2, plan=program.plan)
    assert again.sources == program.sources
    with pytest.raises(autopar.PlanError, match="precision='bf16', Options ask for precision='fp16'"):
        compiled_zoo(zoo, 2, options=autopar.Options(precision="fp16"), plan=program.plan)


def test_the_report_and_the_emitted_files_say_it(tmp_path: Any) -> None:
    program = compiled(BY_NAME["llama"], "zero3")
    assert "computed in bf16 with float32 parameters" in program.report()
    text = (program.save(tmp_path) / "stages" / "stage_0.py").read_text()
    assert re.search(r"\(\('all_gather', \('dp',\), \d\),\), torch\.bfloat16\)", text)
    assert "dtype='bfloat16'" not in text.split("INPUTS")[0]  # parameters and buffers rest in float32
    pipeline = running.stage_module(text, "stage")
    assert pipeline.STAGE == 0


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize(("strategy", "mesh"), [("zero3", {"dp": 2}), ("megatron", {"dp": 1, "tp": 2})])
def test_processes_compute_what_threads_do(strategy: str, mesh: dict[str, int], tmp_path: Any) -> None:
    """The processes run over Gloo, from the saved files; the sum of two ranks' 16 bits is the same in any order."""
    options = {"precision": "bf16", "strategy": strategy, "mesh": mesh}
    program = processes.compiled(2, processes.Model(), **options)
    directory = processes.saved(program, tmp_path / "program", batches=3)
    run = program.run([processes.batch(step) for step in range(3)])
    for rank in processes.in_torchrun("curve", 2, directory, tmp_path):
        assert rank["losses"] == pytest.approx([loss.item() for loss in run], rel=1e-6)
        for name, value in run.state_dict().items():
            torch.testing.assert_close(rank["weights"][name], value, rtol=1e-5, atol=1e-6)
