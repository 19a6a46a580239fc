"""Options of a program that reach run time: a field here is all that says so.

`autopar.Options` has every field of `RunOptions` and checks it as it is declared here, manifest.json says it, and every rank's
session has it as `session.options`, in this process as under torchrun. What acts on an option asks there.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated

import torch

from ..compiled.inductor import COMPILERS
from ..data.schema import choice, integer

Seed = Annotated[int, integer(-(1 << 63), (1 << 63) - 1)]
"""The largest number of an option, which fits into 64 bits."""


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options that reach run time.

    compiler: of what the program computes between its messages: "none", "inductor" (each distinct block is compiled once by
        torch's inductor, at the end of the first step), or "auto": inductor on GPUs, none on CPUs and where steps are captured
        as CUDA graphs. Memory is promised for the program as it is written.
    cuda_graphs: capture forward and backward of a step on a GPU once as a CUDA graph and play it from then on, so that the
        host starts one thing instead of every kernel. Where that cannot be (several ranks, sizes that data decides,
        …) a CudaGraphWarning says why when the program runs, and steps run as they are written. Memory is promised for these.
    matmul_precision: of products of float32, as `torch.set_float32_matmul_precision` takes it: "highest"; with "high" and
        "medium" NVIDIA's GPUs compute them in TF32, and they are priced so. Anything but the default is set for the process.
    cudnn_benchmark: cuDNN tries its kernels for every convolution and takes the fastest, as `torch.backends.cudnn.benchmark`
        says; set for the process.
    rebalance: ranks along the axis that batches take hold rows by *shares*, which follow the speeds that a run measures. Rows
        move between steps and nothing that rests does.
    """

    compiler: Annotated[str, choice(COMPILERS)] = "auto"
    cuda_graphs: bool = False
    matmul_precision: Annotated[str, choice(("highest", "high", "medium"))] = "highest"
    cudnn_benchmark: bool = False
    rebalance: bool = False

    def at_run_time(self) -> RunOptions:
        """The options that reach run time, without what a class derived from this one adds."""
        return RunOptions(**{one.name: getattr(self, one.name) for one in fields(RunOptions)})

    def set_in_torch(self) -> None:
        """Set what torch has a setting of its own for."""
        if self.matmul_precision != "highest":
            torch.set_float32_matmul_precision(self.matmul_precision)
        if self.cudnn_benchmark:
            torch.backends.cudnn.benchmark = True


DEFAULTS = RunOptions()
