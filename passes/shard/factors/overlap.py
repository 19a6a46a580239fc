"""The exposed share of parameters' messages that a solver counts: the share that computation cannot hide.

The reader of a bill (`autopar.costmodel.bill`) exposes max(messages - computation, share · messages), which is no sum. A
solver's objective is one: it takes messages at the share that is exposed if all parameters were sharded over the cheapest axis
of the mesh and all ops perfectly shared, max(1 - computation / messages, share). With microbatches it counts them in full:
sums of gradients that wait for their reduction take memory that it does not see, and cheap messages would draw it there.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.ir.program import Program
from autopar.ir.setting import Setting
from autopar.passes.price.compression import LEAST_ITEMSIZE
from autopar.passes.price.pricer import Pricer
from autopar.passes.rules.book import RuleBook
from autopar.runtime.gradients.bucket_sizes import BUCKETED


@dataclass(frozen=True)
class OverlapShares:
    """Shares of the seconds that a step pays: of gathers for every microbatch, of reductions of gradients, and of gathers of
    updated values."""

    each: float = 1.0
    reduce: float = 1.0
    update: float = 1.0


def overlap_shares(program: Program, pricer: Pricer, rules: RuleBook, setting: Setting) -> OverlapShares:
    """The shares of a program on the pricer's mesh."""
    software = pricer.software
    if not program.training or setting.microbatches > 1 or min(software.shards_share, software.reduce_share) == 1.0:
        return OverlapShares()
    templates = program.templates.items()
    compute_s = sum(
        program.multiplicity[name] * float(pricer.op_choices(call, rules.rule(call)).seconds.min())
        for name, template in templates
        for call in template.op_calls.values()
    )
    sizes = [parameter.type.nbytes for parameter in program.parameters.values()]
    axes = [axis for axis, size in pricer.mesh.axes if size > 1]

    def messages_s(kind: str) -> float:
        price = pricer.joined_s((kind,), setting.compression if kind in BUCKETED else "", LEAST_ITEMSIZE)
        seconds = [{nbytes: price(kind, nbytes, axis) for nbytes in set(sizes)} for axis in axes]
        return min((sum(map(along_axis.__getitem__, sizes)) for along_axis in seconds), default=0.0)

    def share(least: float, seconds: float, behind_s: float) -> float:
        return max(least, 1 - behind_s / seconds) if seconds > 0 else least

    backward_s = 2 / 3 * compute_s
    return OverlapShares(
        share(software.shards_share, 2 * messages_s("all_gather"), compute_s),
        share(software.reduce_share, messages_s("reduce_scatter"), backward_s),
        software.gather_share,
    )
