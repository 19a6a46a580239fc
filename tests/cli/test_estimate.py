"""The command lines: tables, JSON, search, errors; calibration end to end; the scoring script on a made-up file."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from autopar.cli import calibrate, estimate
from autopar.costmodel import calibrate as measuring
from benchmarks import published_runs


def test_estimate_prints_a_table_and_json(capsys):
    assert estimate.main(["--cluster", "dgx-h100", "--batch", "128", "--plan", "tp=2,zero=1"]) == 0
    out = capsys.readouterr().out
    assert "tokens/s per device" in out
    assert "128 sequences on 8 devices" in out
    assert "tp communication" in out.split("why")[1]
    assert estimate.main(["--cluster", "dgx-h100", "--batch", "128", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["step_time_s"] > 1
    assert "compute" in facts["reason"]


def test_estimate_searches_with_reasons(capsys):
    assert estimate.main(["--cluster", "dgx-h100", "--nodes", "2", "--batch", "128", "--search"]) == 0
    out = capsys.readouterr().out
    assert "pruned by their bound" in out
    assert "slower" in out
    assert "compute" in out


def test_estimate_reads_a_model_config(tmp_path, capsys):
    config = {
        "model_type": "llama",
        "hidden_size": 2048,
        "num_attention_heads": 16,
        "num_hidden_layers": 16,
        "intermediate_size": 5632,
        "vocab_size": 32000,
        "max_position_embeddings": 2048,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert estimate.main(["--config", str(tmp_path / "config.json"), "--batch", "64"]) == 0
    assert "model FLOPs utilisation" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--batch", "127"], "no multiple of dp*micro_batch"),
        (["--batch", "128", "--plan", "tp=three"], "--plan: 'tp=three'"),
        (["--batch", "128", "--model", "gpt9"], "unknown model 'gpt9'"),
        (["--batch", "128", "--cluster", "moon"], "unknown cluster preset 'moon'"),
        (["--batch", "128", "--model", "gpt3-175b", "--search"], "TB short"),
    ],
)
def test_estimate_explains_mistakes(args, message, capsys):
    assert estimate.main(args) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.startswith("autopar-estimate: ")


def in_one_sweep(*arguments):
    """A rank that measures, in a process of its own."""
    measuring.SWEEPS = 1
    measuring._worker(*arguments)


@pytest.mark.slow
@pytest.mark.parametrize("sweeps", [1, measuring.SWEEPS])
def test_calibration_writes_a_profile_with_residuals(sweeps, tmp_path, capsys, monkeypatch):
    if sweeps == 1:
        monkeypatch.setattr(measuring, "_worker", in_one_sweep)
    path = tmp_path / "profile.json"
    assert calibrate.main(["--quick", "--ranks", "2", "-o", str(path)]) == 0
    profile = json.loads(path.read_text())
    assert profile["device"]["curve"]["attention"] > 0
    assert profile["links"]["node"]["bandwidth_Bps"] > 0
    assert profile["residuals"]
    assert "residuals" in capsys.readouterr().out


def test_calibration_says_at_once_where_it_cannot_write(tmp_path):
    assert calibrate.main(["-o", str(tmp_path / "none" / "p.json")]) == 2


def test_a_sample_of_published_runs_is_predicted_well():
    rows = json.loads((Path(__file__).parents[1] / "costmodel" / "estimator" / "published_sample.json").read_text())
    result = published_runs.score(rows)
    assert not result["failed"]
    assert result["step_time"]["arch"]["dense"]["median"] <= 0.08
    assert abs(result["step_time"]["arch"]["dense"]["bias"]) <= 0.03
    assert result["step_time"]["arch"]["moe"]["median"] <= 0.15
    assert result["memory"]["all"]["median"] <= 0.1
    assert not any(row["fits"] for row in result["oom"])


def test_published_runs_scores_a_file(tmp_path, capsys):
    def row(n: int, step: float) -> dict:
        return {
            "id": f"r{n}",
            "group": "made up",
            "series": "made up",
            "quality": "A",
            "score_on": ["step_time", "memory"],
            "category": {"arch": "dense"},
            "model": {"layers": 32, "hidden": 4096, "heads": 32, "ffn": 11008, "vocab": 32000, "seq_len": 4096}
            | {"dtype": "bf16", "gated_mlp": True},
            "hardware": {"gpu": "H100-SXM5-80GB", "gpus": n, "gpus_per_node": 8},
            "parallel": {"dp": n, "zero": 1},
            "batch": {"global": 64, "micro": 1},
            "recompute": "none",
            "schedule": "none",
            "measured": {"memory_GB": 60},
            "derived": {"step_time_s": step},
        }

    path = tmp_path / "runs.json"
    path.write_text(json.dumps([row(8, 4.0), row(16, 2.0), row(32, 1.0), row(64, 0.5)]))
    assert published_runs.main(["--file", str(path), "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "rank correlation" in out
    result = json.loads((tmp_path / "published_runs_score.json").read_text())
    assert result["step_time"]["arch"]["dense"]["rows"] == 4
    assert result["series"]["made up"]["rank_correlation_step_time"] == pytest.approx(1.0)
    assert published_runs.main(["--file", str(tmp_path / "none.json")]) == 2
    plot = ElementTree.parse(tmp_path / "published_runs.svg")
    assert len(plot.findall(".//{*}g[@id='runs-dense']//{*}use")) == 4
