"""Written files are taken by the parsers of the systems that it is for, where these are installed."""

from __future__ import annotations

import importlib
import json
from types import SimpleNamespace

import pytest

from autopar.exchange import deepspeed, torchtitan, tp_plan
from autopar.exchange.keys import Facts
from tests.exchange.published import RUNS, Run, layout_of

pytestmark = pytest.mark.slow
every_run = pytest.mark.parametrize("run", RUNS, ids=lambda run: run.id)


@every_run
def test_torchtitan_takes_its_sections(run: Run) -> None:
    config = pytest.importorskip("torchtitan.config")
    layout = layout_of(run)
    keys = torchtitan.sections(torchtitan.write(layout, Facts(ranks=layout.ranks)).files["recipe.py"])
    for section, name in torchtitan.SECTIONS.items():
        own = {key.partition(".")[2]: value for key, value in keys.items() if key.startswith(f"{section}.")}
        made = getattr(config, name)(**own)
        assert {key: getattr(made, key) for key in own} == own


@every_run
def test_deepspeed_takes_its_json(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("deepspeed")
    if run.pp * run.cp > 1:
        pytest.skip("pipelines and context parallelism are not said in its JSON")
    module = importlib.import_module("deepspeed.runtime.config")
    layout = layout_of(run)
    written = deepspeed.write(layout, Facts(ranks=layout.ranks))
    values = json.loads(written.files["deepspeed.json"])
    monkeypatch.setattr(module.dist, "get_rank", lambda *_: 0)
    monkeypatch.setattr(module.dist, "get_world_size", lambda *_: written.carried.dp)
    monkeypatch.setattr(module.dist, "is_initialized", lambda *_: True)
    mpu = SimpleNamespace(get_data_parallel_world_size=lambda: written.carried.dp)
    made = module.DeepSpeedConfig(values, mpu=mpu)
    assert made.zero_config.stage == run.zero
    assert made.train_batch_size == run.global_batch
    assert made.train_micro_batch_size_per_gpu == written.carried.micro_batch


@every_run
def test_accelerate_takes_its_degrees(run: Run) -> None:
    accelerate = pytest.importorskip("accelerate")
    from autopar.exchange import accelerate as own

    layout = layout_of(run)
    written = own.write(layout, Facts(ranks=layout.ranks))
    carried = written.carried
    made = accelerate.ParallelismConfig(
        dp_replicate_size=carried.dp_replicate, dp_shard_size=carried.dp_shard, tp_size=carried.tp, cp_size=carried.cp
    )
    assert made.total_size == layout.ranks


def test_transformers_knows_the_styles() -> None:
    module = "transformers.integrations.tensor_parallel"
    pytest.importorskip("transformers")
    known = importlib.import_module(module).ALL_PARALLEL_STYLES.keys()
    assert set(tp_plan.STYLES.values()) <= set(known)
