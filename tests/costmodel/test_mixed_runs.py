"""Published iterations on mixed clusters: how their rows are read, and that one plan is priced for the cluster of each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import mixed_runs
from benchmarks.mixed_runs import cluster_of, read_mixed

HEADER = (
    "source,cluster,model,gpus,tp,dp,pp,stage_layers_or_cuts,micro_batch,global_batch,measured_s_per_iteration,peak_bytes,"
    "source_predicted_s\n"
)
GPT = '"GPT-2 24 layers, hidden 1024, seq 1024, vocab 52256, fp16",16,2,2,4,"[0, 8, 14, 20, 30]",8,32'
T4 = f'AMP (NeurIPS\'22) results,"16 T4 (4 nodes of 4, 50 Gbit/s)",{GPT},2.5,,4.4852\n'
MIXED = f'AMP (NeurIPS\'22) results,"12 V100 (NVLink, 3 nodes of 4) + 4 T4 (1 node)",{GPT},1.91,,4.1555\n'
SAILOR = (
    'Sailor (SOSP\'25) validation,"GH200-96 nodes of 4; 125/251 GB/s among 2/4 in a node",'
    '"OPT-350M: hidden 1024, 24 layers (+2 for embedding, head), 16 heads, seq 2048, vocab 50304+2048 positions, float32 '
    'stored",32,4,2x2x2x2,4,5|7|7|7,8,512,2.69795,25248661504,\n'
)


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "mixed_runs.csv"
    path.write_text(HEADER + T4 + MIXED + SAILOR)
    return str(path)


def test_rows_say_plan_model_and_cluster(file: str) -> None:
    t4, mixed, sailor = read_mixed(file)
    assert t4.firsts == mixed.firsts == (6, 12, 18)
    assert t4.options.stage_boundaries == ("blocks.6", "blocks.12", "blocks.18")
    assert (t4.options.mesh, t4.options.microbatches, t4.options.precision) == ({"dp": 2, "tp": 2}, 2, "fp16")
    assert (t4.shape.layers, t4.shape.hidden, t4.shape.heads, t4.shape.vocab) == (24, 1024, 16, 52256)
    assert (sailor.dp, sailor.firsts, sailor.options.microbatches) == (2, (4, 11, 18), 32)
    assert (sailor.shape.layers, sailor.shape.seq_len, sailor.options.matmul_precision) == (24, 2048, "high")
    assert [(n, d.name) for n, d in cluster_of(mixed).devices] == [(12, "v100-16"), (4, "t4")]
    assert (cluster_of(t4).size, cluster_of(sailor).size) == (16, 32)
    assert cluster_of(t4).levels[-1].shared
    assert not cluster_of(sailor).levels[-1].shared


def test_one_plan_is_priced_for_the_cluster_of_each_row(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert mixed_runs.main(["--file", file, "--only", "AMP"]) == 0
    result = json.loads(capsys.readouterr().out)
    t4, mixed = result["rows"]
    assert t4["plan"] == mixed["plan"]
    assert abs(t4["error"]) <= 0.15
    assert abs(mixed["error"]) <= 0.15
    assert result["summary"]["all"]["rows"] == 2
    assert result["summary"]["AMP: 16 T4 (4 nodes of 4, 50 Gbit/s)"]["median"] == pytest.approx(abs(t4["error"]))


def test_a_file_that_is_not_there_is_said(tmp_path: Path) -> None:
    assert mixed_runs.main(["--file", str(tmp_path / "none.csv")]) == 2
