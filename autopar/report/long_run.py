"""A compiled program as a run of weeks: how often to save, and what is left of the time after failures."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.compiled import Compiled
from autopar.costmodel.bill import cluster_nodes
from autopar.costmodel.goodput import Failures, Outcome, Saving, best_interval_s, simulate
from autopar.ir.resting import of_program
from autopar.report.program_facts import LongRunFacts

DAYS = 30
"""Days of the run that is simulated."""


@dataclass(frozen=True)
class LongRun:
    """The expectation for a long run. save_every: steps."""

    failures: Failures
    saving: Saving
    save_every: int
    interval_s: float
    outcome: Outcome

    @property
    def goodput(self) -> float:
        """Share of the time in which work was done that stayed."""
        return self.outcome.goodput


def state_bytes(program: Compiled) -> float:
    """Bytes of parameters, buffers and optimizer state, each once."""
    kept = (row.nbytes for row in of_program(program.ir, program.setting) if row.kind != "gradients")
    return sum(kept) + sum(float(b.type.nbytes) for b in program.ir.buffers.values())


def long_run(program: Compiled) -> LongRun | None:
    """Nothing for inference, and where the cluster does not say how often it fails.

    A copy of the state to the host goes over every device's own way there, and each is counted to hold as much as any; to where
    checkpoints rest all nodes write at once.
    """
    known, cluster = program.cluster.reliability, program.cluster
    if known is None or not program.training:
        return None
    nodes = cluster_nodes(cluster)
    failures = Failures(
        known.device_mtbf_s / program.plan.ranks,
        known.detect_s + known.restart_s,
        int(nodes),
        known.spare_nodes,
        known.repair_s,
    )
    resting = max(sum(b for kind, b in s.memory.resting.items() if kind != "gradients") for s in program.account.stages)
    stall_s = resting / min(device.host_bandwidth_Bps for _, device in cluster.devices)
    saving = Saving(stall_s, state_bytes(program) / (nodes * known.storage_Bps))
    step_s = program.predicted.step_time_s
    interval_s = best_interval_s(saving, failures, step_s)
    outcome = simulate(DAYS * 86400.0, interval_s, saving, failures)
    return LongRun(failures, saving, round(interval_s / step_s), interval_s, outcome)


def long_run_facts(program: Compiled) -> LongRunFacts | None:
    """The facts of a long run as program.json has them."""
    known = long_run(program)
    if known is None:
        return None
    saving = known.saving
    return LongRunFacts(known.failures.mtbf_s, saving.stall_s, saving.write_s, known.save_every, known.goodput)
