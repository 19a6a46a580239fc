"""A program's request with something changed, planned by the search and priced by the price of every request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Generic, TypeVar

from autopar.cluster import ClusterSpec
from autopar.compiled import Compiled
from autopar.options import Options
from autopar.plan import Plan
from autopar.request import Request

P = TypeVar("P", bound=Compiled)


@dataclass(frozen=True)
class Replanner(Generic[P]):
    """Plans of a program's request with something changed. compile_again: meets a request, as `ParallelProgram.compile_again`."""

    program: P
    compile_again: Callable[[Request], P]

    def replanned(self, options: Options, *, cluster: ClusterSpec | None = None, times: Fraction | int = 1) -> P:
        """The program of the same step with other options; cluster, times: as of `Request.searched`. What would do where nothing
        fits is not looked for. Raises what `compile` raises."""
        request = self.program.request.searched(options, cluster=cluster, times=times)
        return self.compile_again(replace(request, options=replace(options, explain_s=0.0)))

    def on_cluster(self, cluster: ClusterSpec) -> P:
        """The program under its own plan, on a cluster of as many ranks. Raises what `compile` raises."""
        plan: Plan = replace(self.program.plan, cluster=cluster.fingerprint())
        options = replace(self.program.options, microbatches=plan.microbatches)
        return self.compile_again(replace(self.program.request, cluster=cluster, options=options).replaying(plan))
