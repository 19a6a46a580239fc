"""Published layouts in the words of other systems: read and written again they are the same keys."""

from __future__ import annotations

import ast
import json
from typing import Any

import pytest
import torch.distributed.pipelining.schedules as torch_schedules
import yaml

from autopar.errors import InputError
from autopar.exchange import accelerate, deepspeed, fsdp2, megatron, torchtitan, tp_plan
from autopar.exchange.formats import FORMATS
from autopar.exchange.keys import Facts
from autopar.exchange.layout import Layout, StageUnits
from autopar.exchange.to_options import options_of
from autopar.ir.schedules import schedule_row
from tests.exchange.published import RUNS, Run

every_run = pytest.mark.parametrize("run", RUNS, ids=lambda run: run.id)


def ranks(run: Run) -> int:
    return run.dp * run.tp * run.pp * run.cp


def per_node(run: Run) -> int:
    return 8 if ranks(run) % 8 == 0 else ranks(run)


def megatron_flags(run: Run) -> dict[str, Any]:
    """A run as its flags of Megatron, those that say nothing left out."""
    degrees = {"tensor": run.tp, "pipeline": run.pp, "expert": run.ep}
    flags: dict[str, Any] = {"nproc_per_node": per_node(run), "nnodes": ranks(run) // per_node(run)}
    flags |= {f"{name}_model_parallel_size": size for name, size in degrees.items() if size > 1}
    flags |= {"context_parallel_size": run.cp} if run.cp > 1 else {}
    flags |= {"num_virtual_stages_per_pipeline_rank": run.vpp} if run.vpp > 1 else {}
    flags |= {"sequence_parallel": True} if run.sequence_parallel else {}
    flags |= {"use_distributed_optimizer": True} if run.zero else {}
    if run.zero > 1:
        flags |= {"use_megatron_fsdp": True, "ckpt_format": "fsdp_dtensor"}
        flags |= {"data_parallel_sharding_strategy": {2: "optim_grads", 3: "optim_grads_params"}[run.zero]}
    flags |= {"recompute_granularity": run.recompute} if run.recompute != "none" else {}
    flags |= {"recompute_method": "uniform", "recompute_num_layers": 1} if run.recompute == "full" else {}
    return flags | {"micro_batch_size": run.micro_batch, "global_batch_size": run.global_batch, run.precision: True}


@every_run
def test_flags_of_megatron_come_back(run: Run) -> None:
    asked = megatron_flags(run)
    words = [f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}") for name, value in asked.items()]
    read = megatron.read(" ".join(["torchrun", *words[:2], "pretrain_gpt.py", *words[2:]]))
    assert not read.unknown
    assert (read.layout.dp, read.layout.microbatches) == (run.dp, run.global_batch // run.dp // run.micro_batch)
    written = megatron.write(read.layout, Facts(per_node=per_node(run), ranks=ranks(run)))
    assert megatron.flags(written.files["megatron.sh"]) == asked
    assert megatron.read(written.files["megatron.sh"]).layout == read.layout == written.carried
    assert not written.not_carried


def titan_text(run: Run) -> tuple[str, dict[str, Any]]:
    """A run as arguments of torchtitan, and what they are."""
    replicate = run.dp if not run.zero else 1
    parallelism: dict[str, Any] = {"data_parallel_replicate_degree": replicate} if replicate > 1 else {}
    parallelism["data_parallel_shard_degree"] = run.dp if run.zero else 1
    parallelism |= {"tensor_parallel_degree": run.tp} if run.tp > 1 else {}
    parallelism |= {"enable_sequence_parallel": False} if run.tp > 1 and not run.sequence_parallel else {}
    if run.pp > 1:
        name = "Interleaved1F1B" if run.vpp > 1 else "1F1B"
        parallelism |= {"pipeline_parallel_degree": run.pp, "pipeline_parallel_schedule": name}
        parallelism |= {"pipeline_parallel_microbatch_size": run.micro_batch}
    parallelism |= {"context_parallel_degree": run.cp} if run.cp > 1 else {}
    parallelism |= {"expert_parallel_degree": run.ep} if run.ep > 1 else {}
    local = run.global_batch // run.dp if run.pp > 1 else run.micro_batch
    training: dict[str, Any] = {"local_batch_size": local, "global_batch_size": run.global_batch}
    training |= {} if run.precision == "bf16" else {"mixed_precision_param": "float32"}
    calls = [
        f"config.{section} = {name}({', '.join(f'{k}={v!r}' for k, v in values.items())})"
        for section, name, values in (
            ("parallelism", "ParallelismConfig", parallelism),
            ("training", "TrainingConfig", training),
        )
    ]
    policy = {"full": "FullAC", "selective": "SelectiveAC"}.get(run.recompute)
    calls += [f"config.activation_checkpoint = {policy}.Config()"] if policy else []
    keys = {f"parallelism.{k}": v for k, v in parallelism.items()} | {f"training.{k}": v for k, v in training.items()}
    return "\n".join(calls), keys | ({"activation_checkpoint": policy} if policy else {})


@every_run
def test_configurations_of_torchtitan_come_back(run: Run) -> None:
    if run.zero and run.dp == 1:
        pytest.skip("one rank of dp shards nothing")
    text, asked = titan_text(run)
    read = torchtitan.read(text)
    assert not read.unknown
    assert read.layout.dp == run.dp
    assert read.layout.microbatches == run.global_batch // run.dp // run.micro_batch
    written = torchtitan.write(read.layout, Facts(ranks=ranks(run)))
    assert torchtitan.sections(written.files["recipe.py"]) == asked
    assert not written.not_carried
    ast.parse(written.files["recipe.py"])


@every_run
def test_configurations_of_deepspeed_come_back(run: Run) -> None:
    asked: dict[str, Any] = {
        "train_batch_size": run.global_batch,
        "train_micro_batch_size_per_gpu": run.micro_batch,
        "gradient_accumulation_steps": run.global_batch // run.dp // run.micro_batch,
        "zero_optimization": {"stage": run.zero},
        run.precision: {"enabled": True},
    }
    asked |= {"tensor_parallel": {"autotp_size": run.tp}} if run.tp > 1 else {}
    read = deepspeed.read(json.dumps(asked))
    assert not read.unknown
    assert read.layout.dp == run.dp
    written = deepspeed.write(read.layout, Facts(ranks=run.dp * run.tp))
    assert json.loads(written.files["deepspeed.json"]) == asked
    assert not written.not_carried


@every_run
def test_configurations_of_accelerate_come_back(run: Run) -> None:
    layout = Layout(
        dp=run.dp,
        tp=run.tp,
        cp=run.cp,
        zero=3 if run.dp > 1 and (run.zero or run.tp * run.cp > 1) else 0,
        precision=run.precision,
    )
    layout = Layout(**(layout.said() | ({"reshard_after_forward": True} if layout.zero else {})))
    written = accelerate.write(layout, Facts(ranks=layout.ranks))
    read = accelerate.read(written.files["accelerate.yaml"])
    assert read.layout == layout == written.carried
    assert not read.unknown
    again = accelerate.write(read.layout, Facts(ranks=layout.ranks))
    assert yaml.safe_load(again.files["accelerate.yaml"]) == yaml.safe_load(written.files["accelerate.yaml"])


def test_there_are_thirty_published_layouts() -> None:
    assert len({run.id for run in RUNS}) >= 30


@pytest.mark.parametrize(
    ("text", "layers"),
    [("Et*3|(tt|)*3,L", [3, 2, 2, 2, 0]), ("E|t*3|t*2L", [0, 3, 2]), ("Ettt|tt|tL", [3, 2, 1]), ("(tt|)*2", [2, 2])],
)
def test_stages_are_read_as_megatron_writes_them(text: str, layers: list[int]) -> None:
    stages = megatron.parse_stages(text)
    assert [stage.layers for stage in stages] == layers
    assert megatron.parse_stages(megatron.show_stages(stages)) == stages


def test_a_stage_without_anything_comes_back() -> None:
    stages = (StageUnits(2, embedding=True), StageUnits(0), StageUnits(1, loss=True))
    assert megatron.parse_stages(megatron.show_stages(stages)) == stages


@pytest.mark.parametrize("text", ["Etm|L", "E(t", "((t)*9999)*9999", "E t x"])
def test_other_stages_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="layout"):
        megatron.parse_stages(text)


def test_what_has_no_meaning_here_is_named() -> None:
    assert set(megatron.read("--tensor-model-parallel-size 2 --moe-router-topk 8 --bf16").unknown) == {
        "moe_router_topk"
    }
    assert set(deepspeed.read('{"train_batch_size": 8, "aio": {"block_size": 4}}').unknown) == {"aio.block_size"}
    assert set(tp_plan.read('{"a": "colwise", "b": "grouped_gemm"}').unknown) == {"b"}
    assert set(torchtitan.read("ParallelismConfig(spmd_backend='x')").unknown) == {"parallelism.spmd_backend"}
    assert set(accelerate.read("debug: false\nmixed_precision: bf16").unknown) == {"debug"}


def test_a_value_that_a_key_does_not_know_is_refused() -> None:
    with pytest.raises(InputError, match=r"zero_optimization\.stage"):
        deepspeed.read('{"zero_optimization": {"stage": 7}}')
    with pytest.raises(InputError, match="tensor_model_parallel_size"):
        megatron.read("--tensor-model-parallel-size two")


def test_what_a_format_has_no_key_for_is_listed() -> None:
    layout = Layout(dp=2, pp=2, tp=2, schedule="zb-h1", micro_batch=1, global_batch=16, recompute="selective")
    lost = {one.what.partition(" ")[0] for one in deepspeed.write(layout, Facts(ranks=8)).not_carried}
    assert lost == {"pp", "schedule", "recompute"}
    assert deepspeed.write(layout, Facts(ranks=8)).carried.dp == 4


@pytest.mark.parametrize("schedule", ["zb-h1", "gpipe", "1f1b", "interleaved", "interleaved-zb"])
def test_torch_reads_the_tables_of_schedules(schedule: str) -> None:
    layout = Layout(
        dp=1,
        pp=2,
        virtual_stages=2 if schedule.startswith("interleaved") else 1,
        schedule=schedule,
        micro_batch=1,
        global_batch=4,
    )
    rows = [row.split(",") for row in torchtitan.schedule_csv(layout).splitlines()]
    actions = [[torch_schedules._Action.from_str(one) for one in row] for row in rows]
    assert len(actions) == 2
    for group, row in enumerate(actions):
        assert all(action.stage_index % 2 == group for action in row)
        assert sum(str(action)[1] == "F" for action in row) == 4 * layout.virtual_stages
        assert [str(action) for action in row] == rows[group]


@pytest.mark.parametrize(("schedule", "name"), list(torchtitan.SCHEDULES.items()))
def test_torchtitan_is_told_the_schedules_of_torch_by_name_and_reads_them(schedule: str, name: str) -> None:
    chunks = 1 if schedule_row(schedule).serves(1) else 2
    layout = Layout(
        dp=1, pp=2, virtual_stages=chunks, schedule=schedule, micro_batch=1, global_batch=8, precision="bf16"
    )
    text = torchtitan.write(layout, Facts(ranks=2)).files["recipe.py"]
    assert torchtitan.sections(text)["parallelism.pipeline_parallel_schedule"] == name
    assert hasattr(torch_schedules, f"Schedule{name}")
    read = torchtitan.read(text).layout
    assert (read.schedule, read.virtual_stages) == (schedule, chunks)


def test_another_schedule_is_carried_as_its_table() -> None:
    layout = Layout(dp=1, pp=2, schedule="zb-h1", micro_batch=1, global_batch=4, precision="bf16")
    written = torchtitan.write(layout, Facts(ranks=2))
    keys = torchtitan.sections(written.files["recipe.py"])
    assert keys["parallelism.pipeline_parallel_schedule"] == "PipelineScheduleMulti"
    assert written.files[keys["parallelism.pipeline_parallel_schedule_csv"]].startswith("0F0,")


def test_every_format_has_a_row() -> None:
    assert list(FORMATS) == ["fsdp2", "tp_plan", "accelerate", "megatron", "torchtitan", "deepspeed"]


def test_constants_of_an_fsdp2_file_come_back() -> None:
    layout = Layout(
        dp=4, replicas=2, tp=2, zero=3, reshard_after_forward=True, modules={"layers.*.up": "colwise"}, precision="bf16"
    )
    written = fsdp2.write(layout, Facts(ranks=8, blocks=("layers.0",)))
    assert fsdp2.read(written.files["parallelize.py"]).layout == layout == written.carried


def test_options_are_those_of_the_degrees() -> None:
    options = options_of(Layout(dp=4, ep=2, tp=2, pp=2, zero=1, schedule="1f1b", micro_batch=1, global_batch=16))
    assert (options.mesh, options.pp) == ({"dp": 2, "ep": 2, "tp": 2}, 2)
    assert (options.strategy, options.schedule, options.microbatches) == ("megatron-zero1", "1f1b", 4)
