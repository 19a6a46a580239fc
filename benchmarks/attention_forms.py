"""Three forms of attention over a sharded sequence on slow links, measured and predicted, one JSON object.

    python -m benchmarks.attention_forms [--steps 7] [--limit N]

A step of one attention layer is compiled for 2 or 4 ranks of the mesh cp=N and put into each form: keys gathered (rows cut,
keys and values whole), ring (keys and values go round), heads (sharded by heads, all-to-all around it). The forms take turns
step by step, every rank a thread, on a clock of processor seconds and of messages as slow as the link's (`delayed.py`), so that
others at work on the machine do not count; a form's seconds are the median of its steps. What is predicted is the account of
the same program on a cluster with that link, whose devices are calibrated right before each setting, with as many ranks at work
on such clocks.

Of every setting: whether the order of the three forms is as predicted (of two forms measured within 3 % of each other either
may be first), and ring / gathered. The link decides where messages of the gathered form take more than 30 % of its predicted
step.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

import autopar
from autopar.costmodel.host_kernels import Measured, fit_kernels, measure_kernels
from autopar.passes.price.pricer import Pricer
from autopar.passes.shard.factors.graph import Key
from autopar.passes.shard.factors.problem import Problem
from autopar.passes.shard.plans import spmd_plan
from autopar.passes.shard.solve import Solution, solve
from autopar.runtime.comm.comm import Comm
from autopar.runtime.comm.threads import run_threads
from autopar.runtime.data.fields import to_data
from benchmarks.delayed import Link, steps_on_link
from benchmarks.harness import command_line, print_json
from tests.ops.rings import Layer

FORMS = {"gathered": "s", "ring": "+s+t", "heads": "h"}
"""The choice of attention along the axis, by the name of its form."""
ROWS = "s"
TIE = 0.03
DECIDES = 0.3


@dataclass(frozen=True)
class Setting:
    """One layer on one link. mbytes: of 1e6 bytes/s that a rank sends."""

    ranks: int
    length: int
    heads: int
    kv_heads: int
    causal: bool
    mbytes: float
    latency_s: float = 1e-4
    width: int = 128

    @property
    def link(self) -> Link:
        return Link(self.mbytes * 1e6, self.latency_s)


SETTINGS = (
    Setting(2, 2048, 4, 4, False, 50),
    Setting(2, 2048, 4, 4, True, 50),
    Setting(2, 4096, 4, 2, False, 15),
    Setting(2, 4096, 4, 2, True, 100),
    Setting(2, 4096, 4, 4, False, 25),
    Setting(2, 4096, 4, 4, True, 20),
    Setting(4, 2048, 4, 4, False, 150),
    Setting(4, 2048, 8, 4, True, 70),
    Setting(4, 4096, 4, 4, False, 80),
    Setting(4, 4096, 4, 4, True, 80),
    Setting(4, 4096, 8, 4, False, 30),
    Setting(4, 4096, 4, 4, False, 500),
    Setting(2, 1024, 4, 4, True, 200),
    Setting(2, 2048, 8, 2, False, 40),
    Setting(2, 2048, 4, 4, True, 10),
    Setting(2, 4096, 4, 4, True, 250),
    Setting(2, 4096, 8, 8, False, 60, width=256),
    Setting(4, 1024, 4, 4, False, 50),
    Setting(4, 2048, 4, 4, True, 30),
    Setting(4, 2048, 8, 8, False, 300),
    Setting(4, 2048, 4, 4, True, 600),
    Setting(4, 4096, 8, 4, True, 40, width=256),
    Setting(4, 4096, 4, 4, True, 300),
    Setting(4, 8192, 4, 4, False, 60),
)


class Loss(nn.Module):
    """x: (1, length, width)."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        self.layer = Layer(setting.width, setting.heads, setting.kv_heads, setting.causal)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).square().mean()


def forms_of(setting: Setting, profile: Mapping[str, Any]) -> dict[str, autopar.Program]:
    """The program of every form, on a cluster of calibrated devices with the setting's link."""
    torch.manual_seed(0)
    program = autopar.compile(
        Loss(setting),
        cluster_on_link(setting.ranks, profile, setting.link),
        (batch_of(setting),),
        optimizer=functools.partial(torch.optim.SGD, lr=1e-3),
        options=autopar.Options(mesh={"cp": setting.ranks}, pp=1),
    )
    return {name: in_form(program, choice) for name, choice in FORMS.items()}


def cluster_on_link(ranks: int, profile: Mapping[str, Any], link: Link) -> autopar.ClusterSpec:
    """So many calibrated devices on a link."""
    cluster = autopar.ClusterSpec.local(ranks).with_profile(profile)
    (level,) = cluster.levels
    return replace(cluster, levels=(replace(level, bandwidth_Bps=link.bandwidth_Bps, latency_s=link.latency_s),))


def in_form(program: autopar.Program, choice: str) -> autopar.Program:
    """The program under the best plan whose products cut the sequence and whose attention makes this choice."""
    mesh = program.plan.stages[0].mesh

    def allowed(key: Key, state: Any) -> bool:
        forced = {"linear": ROWS, "attention": choice} if key[0] == "op" else {}
        return all(state == (wanted,) for name, wanted in forced.items() if key[2].startswith(name))

    problem = Problem(program.ir, Pricer(program.cluster, mesh), program.rules, program.setting, allowed)
    solution = solve(problem.graph, tie_price=1e-18)
    assert isinstance(solution, Solution)
    return program.with_plan(spmd_plan(problem, list(solution.choice), program.cluster, program.options, "by hand"))


def batch_of(setting: Setting) -> Tensor:
    return torch.randn(1, setting.length, setting.width, generator=torch.Generator().manual_seed(0))


def measured(setting: Setting, programs: Mapping[str, autopar.Program], steps: int) -> dict[str, float]:
    """Median seconds of a step of every form. Raises ArithmeticError where their losses differ."""
    turns = steps_on_link(setting.link, {"cp": setting.ranks}, programs, [batch_of(setting)], steps)
    losses = [of_form[-1] for of_form in turns.losses.values()]
    if max(losses) - min(losses) > 1e-5 * max(losses):
        raise ArithmeticError(f"{setting}: the forms' losses are {losses}")
    return {name: statistics.median(seconds) for name, seconds in turns.seconds.items()}


def in_order(predicted_s: Mapping[str, float], measured_s: Mapping[str, float]) -> bool:
    """Whether of every two forms that differ the one is faster that should be."""
    for a, b in itertools.combinations(predicted_s, 2):
        ratio = measured_s[a] / measured_s[b]
        tie = 1 / (1 + TIE) <= ratio <= 1 + TIE
        if not tie and (ratio < 1) != (predicted_s[a] < predicted_s[b]):
            return False
    return True


def row(setting: Setting, steps: int) -> dict[str, Any]:
    """The row of a setting."""
    programs = forms_of(setting, device_profile(setting.ranks))
    predicted_s = {name: program.predicted.step_time_s for name, program in programs.items()}
    measured_s = measured(setting, programs, steps)
    gathered = programs["gathered"].predicted
    share = gathered.comm_time_s / gathered.step_time_s
    return {
        "setting": asdict(setting),
        "measured_s": {name: round(s, 4) for name, s in measured_s.items()},
        "predicted_s": {name: round(s, 4) for name, s in predicted_s.items()},
        "order_is_right": in_order(predicted_s, measured_s),
        "gathered_message_share": round(share, 3),
        "link_decides": share > DECIDES,
        "ring/gathered": round(measured_s["ring"] / measured_s["gathered"], 3),
        "predicted_ring/gathered": round(predicted_s["ring"] / predicted_s["gathered"], 3),
    }


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """All settings together."""
    decided = [r["ring/gathered"] for r in rows if r["link_decides"]]
    errors = [r["predicted_s"][f] / r["measured_s"][f] - 1 for r in rows for f in FORMS]
    return {
        "benchmark": "attention_forms",
        "settings": len(rows),
        "orders_right": sum(r["order_is_right"] for r in rows),
        "link_decides": len(decided),
        "ring/gathered_where_the_link_decides": sorted(decided),
        "median_error": round(statistics.median(map(abs, errors)), 3),
        "rows": rows,
    }


def device_profile(ranks: int) -> dict[str, Any]:
    """The profile of a rank that a calibration gives where so many are at work, threads as in a step."""

    def run(comm: Comm) -> list[Measured]:
        return measure_kernels(True, lambda text: None, comm.barrier, time.thread_time)

    times, _ = fit_kernels(run_threads(ranks, {"cp": ranks}, run)[0])
    return {"device": {"kernels": to_data(times)}}


def main() -> None:
    parser = command_line(__doc__, steps=7)
    parser.add_argument("--limit", type=int, default=len(SETTINGS), help="the first settings alone")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = [row(setting, args.steps) for setting in SETTINGS[: args.limit]]
    print_json(summary(rows))


if __name__ == "__main__":
    main()
