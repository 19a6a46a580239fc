"""Scores predictions for published iterations on mixed and slow clusters, and the plans chosen for these.

`python -m benchmarks.mixed_runs --file mixed_runs.csv [--only TEXT] [--choose] [--out DIR]` compiles the model of every row
under the row's plan (stages cut where it says, microbatches, tensor and data parallelism), prices it for the row's cluster and
prints JSON: the relative error of every row, and medians. With `--choose` the model of every cluster's best measured row is
compiled freely, and the plan that the search chooses is compared with that row's plan, both as they are priced here. A row is
compiled for machines of one kind, and priced for its own: a plan does not depend on devices.

Sources: AMP (NeurIPS 2022), GPT-2 with DeepSpeed and Megatron 1.1.5 in fp16 without checkpointing, on AWS: nodes of 4 T4, and of
4 V100 with NVLink, the T4 node last. Sailor (SOSP 2025), on nodes of 4 GH200, storage in float32 and products in TF32.
"""

from __future__ import annotations

import argparse
import csv
import functools
import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch

import autopar
from autopar.cluster import ClusterSpec
from autopar.costmodel.estimator.shape import TransformerShape
from autopar.costmodel.simulate import Durations, makespan_s
from autopar.costmodel.software import Software, default_constants
from autopar.passes.account.program import Account, account
from autopar.passes.price.pricer import Pricers
from autopar.request import as_computed
from benchmarks.published_models import Transformer
from benchmarks.published_rows import write_result

GPUS_PER_NODE = 4
GBIT = 1e9 / 8
ANY_MEMORY_BYTES = 1e15


@dataclass(frozen=True)
class MixedRow:
    """A measured iteration. firsts: of every stage but the first its first layer (as many as the model has: its head)."""

    source: str
    cluster: str
    model: str
    gpus: int
    tp: int
    dp: int
    pp: int
    firsts: tuple[int, ...]
    micro: int
    batch: int
    measured_s: float

    @classmethod
    def of(cls, row: dict[str, str]) -> MixedRow:
        cuts, sizes = row["stage_layers_or_cuts"], ("gpus", "tp", "pp", "micro_batch", "global_batch")
        if cuts.startswith("["):  # embedding, a reshape, 24 layers, a reshape, norm, head and loss: 30 units
            firsts = [unit - 2 for unit in json.loads(cuts)[1:-1]]
        else:  # the embedding is a layer of the first stage, the head one of the last
            firsts = [units - 1 for units in accumulate(map(int, cuts.split("|")))][:-1]
        gpus, tp, pp, micro, batch = (int(row[name]) for name in sizes)
        measured_s = float(row["measured_s_per_iteration"])
        dp = int(row["dp"].split("x")[0])
        return cls(
            row["source"].split()[0],
            row["cluster"],
            row["model"],
            gpus,
            tp,
            dp,
            pp,
            tuple(firsts),
            micro,
            batch,
            measured_s,
        )

    @property
    def plan(self) -> str:
        """The plan in a few words."""
        return f"tp={self.tp} dp={self.dp} pp={self.pp} at {list(self.firsts)} micro={self.micro} of {self.batch}"

    @property
    def named(self) -> dict[str, Any]:
        """The source, the cluster and the model in a few words."""
        cluster, model = self.cluster.split(";")[0], re.split("[:,]", self.model)[0]
        return {"source": self.source, "cluster": cluster, "model": model, "gpus": self.gpus}

    @property
    def shape(self) -> TransformerShape:
        """The model; scores are written to memory, as there is no flash attention."""
        hidden = int(re.search(r"hidden (\d+)", self.model)[1])  # type: ignore[index]
        layers = int(re.search(r"(\d+) (?:\(\+2\) )?layers", self.model)[1])  # type: ignore[index]
        heads = re.search(r"(\d+) heads", self.model)
        vocab = re.search(r"vocab (\d+)", self.model)
        seq = int(re.search(r"seq (\d+)", self.model)[1])  # type: ignore[index]
        heads_ = int(heads[1]) if heads else 16
        return TransformerShape(
            layers=layers,
            hidden=hidden,
            heads=heads_,
            kv_heads=heads_,
            head_dim=hidden // heads_,
            ffn=4 * hidden,
            vocab=int(vocab[1]) if vocab else 50257,
            seq_len=seq,
            gated_mlp=False,
            attention="materialised",
            tied_embeddings=True,
            name=self.model,
        )

    @property
    def options(self) -> autopar.Options:
        """The options that leave the row's plan alone."""
        paths = [f"blocks.{first}" if first < self.shape.layers else "norm" for first in self.firsts]
        return replace(
            self.free_options,
            mesh={axis: n for axis, n in (("dp", self.dp), ("tp", self.tp)) if axis == "dp" or n > 1},
            strategy="megatron" if self.tp > 1 else "dp",
            pp=self.pp,
            stage_boundaries=tuple(paths) or None,
            schedule="1f1b" if self.pp > 1 else "auto",
            microbatches=self.batch // self.dp // self.micro,
            memory_bytes=ANY_MEMORY_BYTES,
        )

    @property
    def free_options(self) -> autopar.Options:
        """The options of a search for the row's model: what its framework can."""
        common = autopar.Options(recompute="none", offload="none", overlap=False, explain_s=0.0)
        amp = self.source == "AMP"
        return replace(common, precision="fp16") if amp else replace(common, matmul_precision="high")

    @property
    def software(self) -> Software:
        """The software of the row's source: kernels of their own for every op, gradients sent after the backward. The host's time
        for a layer is fitted to the eight rows of Sailor in microbatches of one or two, whose hosts are Arm's."""
        constants = default_constants()
        width = (
            2.0 if self.source == "AMP" else 4.0
        )  # both send gradients in float32 (AMP's ds_config.json: fp32_allreduce)
        return Software(
            precision="float16" if self.source == "AMP" else "tfloat32",
            kernels="apart",
            overlap_tp=False,
            grad_bytes=width,
            reduce_bytes=4.0,
            copy_bytes=width,
            late_reduction=True,
            regathers=False,
            constants=constants if self.source == "AMP" else replace(constants, dense_host_s=3.2e-3),
        )


def read_mixed(path: str) -> list[MixedRow]:
    """Every row. Raises FileNotFoundError."""
    with Path(path).open(newline="") as lines:
        return [MixedRow.of(row) for row in csv.DictReader(lines)]


def cluster_of(row: MixedRow) -> ClusterSpec:
    """The cluster of a row, machines in the order of its ranks. What Ethernet carries for a node is shared by its devices."""
    node = {"devices_per_node": GPUS_PER_NODE}
    if row.source == "Sailor":
        device = {"preset": "h100", "name": "h100-gh200", "memory_bytes": 102e9, "memory_bandwidth_Bps": 4.0e12}
        nodes = [{**node, "count": row.gpus // GPUS_PER_NODE, "device": device, "bandwidth_GBps": 251, "efficiency": 1}]
        return ClusterSpec.from_dict({"nodes": nodes, "network": {"bandwidth_GBps": 22.9, "efficiency": 1}})
    t4 = {**node, "device": "t4", "bandwidth_GBps": 50 / 8}
    v100 = {**node, "device": "v100-16", "bandwidth_GBps": 170 / 8}
    mixed = "V100" in row.cluster
    nodes = [{**v100, "count": 3}, t4] if mixed else [{**t4, "count": 4}]
    network = {"bandwidth_GBps": (10 if mixed else 50) / 8 / GPUS_PER_NODE, "shared": True}
    return ClusterSpec.from_dict({"nodes": nodes, "network": network})


def _compiled(
    shape: TransformerShape, cluster: ClusterSpec, batch: int, options: autopar.Options
) -> autopar.ParallelProgram:
    with torch.device("meta"):
        model, ids = Transformer(shape), torch.zeros(batch, shape.seq_len, dtype=torch.long)
    optimizer = functools.partial(torch.optim.Adam, lr=1e-4)
    return autopar.compile(model, cluster, (ids, ids), optimizer=optimizer, options=options)


def predicted_s(program: autopar.ParallelProgram, row: MixedRow, cluster: ClusterSpec) -> float:
    """Seconds of the program's step on a cluster, ranks in the order of its machines, under the software of a row."""
    assert program.lowered is not None
    stages, templates = program.plan.stages, program.ir.templates
    pricers = Pricers(as_computed(cluster, row.free_options), row.software)
    counted = account(program.lowered, stages, templates, pricers, program.setting, program.rules)
    return counted.read(lambda seconds: _blocking_s(counted, seconds)).step_s


def _blocking_s(counted: Account, seconds: Durations) -> float:
    """Seconds of a pipeline whose stages compute nothing while they send or receive, as DeepSpeed's do."""
    busy = dict(seconds)
    for (source, target), sent_s in counted.hand_over.items():
        for stage in (source, target):
            busy[stage, "F" if source < target else "B"] += sent_s
    return makespan_s(counted.table, counted.graph, busy, 0.0)


def under_its_plan(row: MixedRow) -> autopar.ParallelProgram:
    """The program of a row's plan, compiled for machines of one kind."""
    cluster = cluster_of(row)
    return _compiled(row.shape, replace(cluster, devices=((row.gpus, cluster.device(0)),)), row.batch, row.options)


def chosen(rows: Sequence[MixedRow]) -> Iterator[dict[str, Any]]:
    """By model, cluster and batch: the best measured row, and the plan that a free search chooses, both as priced here."""
    groups: dict[tuple[object, ...], list[MixedRow]] = {}
    for row in rows:
        groups.setdefault((row.model, row.cluster, row.gpus, row.batch), []).append(row)
    for group in groups.values():
        best = min(group, key=lambda row: row.measured_s)
        program = _compiled(best.shape, cluster_of(best), best.batch, best.free_options)
        ours_s = predicted_s(program, best, program.cluster)
        best_s = predicted_s(under_its_plan(best), best, cluster_of(best))
        yield {
            **best.named,
            "best_measured": best.plan,
            "best_s": best_s,
            "chosen": program.plan.show_meshes(),
            "chosen_s": ours_s,
            "above_best": ours_s / best_s - 1,
        }


def scored(rows: Sequence[MixedRow]) -> Iterator[dict[str, Any]]:
    """Every row with its prediction; rows of one plan are compiled once."""
    groups: dict[tuple[object, ...], list[MixedRow]] = {}
    for row in rows:
        groups.setdefault((row.model, row.gpus, row.plan), []).append(row)
    for group in groups.values():
        program = under_its_plan(group[0])
        for row in group:
            seconds = predicted_s(program, row, cluster_of(row))
            yield {
                **row.named,
                "plan": row.plan,
                "measured_s": row.measured_s,
                "predicted_s": seconds,
                "error": seconds / row.measured_s - 1,
            }


def summary(points: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Medians of the absolute and the signed error, of all rows and by cluster."""
    groups: dict[str, list[float]] = {"all": [point["error"] for point in points]}
    for point in points:
        groups.setdefault(f"{point['source']}: {point['cluster']}", []).append(point["error"])
    return {
        name: {
            "rows": len(errors),
            "median": float(np.median(np.abs(errors))),
            "bias": float(np.median(errors)),
            "worst": float(np.max(np.abs(errors))),
        }
        for name, errors in groups.items()
    }


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", default="mixed_runs.csv", help="a CSV file of rows")
    parser.add_argument("--only", default="", help="rows alone whose source, cluster, model or plan has this text")
    parser.add_argument("--choose", action="store_true", help="search plans freely too")
    parser.add_argument("--out", help="folder for mixed_runs_score.json")
    args = parser.parse_args(argv)
    try:
        rows = read_mixed(args.file)
    except FileNotFoundError as err:
        print(f"mixed_runs: {err}; give --file", file=sys.stderr)
        return 2
    wanted = [row for row in rows if args.only in f"{row.source} {row.cluster} {row.model} {row.plan}"]
    points = list(scored(wanted))
    result = {"summary": summary(points), "rows": points, "chosen": list(chosen(wanted)) if args.choose else []}
    print(json.dumps(result, indent=1))
    if args.out:
        write_result(args.out, "mixed_runs_score.json", result)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
