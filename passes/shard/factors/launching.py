"""Templates that a host launches more slowly than any device computes them: how their ops are sharded does not show.

A call takes no less than the host needs to launch it (`autopar.costmodel.bill.call_seconds`), and its messages come on top. Of a
block whose ops take 0.2 ms on every rank even unsharded, and 0.6 ms to launch, a message that halves what they compute saves
nothing. There the solver counts the host's seconds for every op, and of the op's own a share so small that it decides between
plans with the same messages only.
"""

from __future__ import annotations

import numpy as np

from autopar.ir.call import OpCall
from autopar.ir.program import Template
from autopar.passes.price.bills import is_kernel
from autopar.passes.price.pricer import Pricer
from autopar.passes.rules.book import RuleBook

_SHARE = 1e-3
"""The share of an op's own seconds that counts where the host is slower."""


def host_is_slower(template: Template, pricer: Pricer, rules: RuleBook) -> bool:
    """Whether launching the template's kernels takes longer than running them, however they are sharded on the mesh."""
    launch_s = pricer.software.launch_host_s
    if not launch_s:
        return False
    kernels = [call for call in template.op_calls.values() if is_kernel(call.op)]
    slowest_s = sum(float(pricer.op_choices(call, rules.rule(call)).seconds.max()) for call in kernels)
    return slowest_s < launch_s * len(kernels)


def launched_s(call: OpCall, seconds: np.ndarray, pricer: Pricer) -> np.ndarray:
    """The seconds that count of an op of such a template, from its seconds under every strategy."""
    return _SHARE * seconds + (pricer.software.launch_host_s if is_kernel(call.op) else 0.0)
