"""The model of the examples that `autopar COMMAND --help` ends with: an MLP that is trained with AdamW.

python examples/command_line.py        compiles it for two ranks of this machine and saves the program, its weights and one
                                       more plan in out/mlp
"""

import functools
from pathlib import Path
from typing import Any

import torch
from torch import nn

import autopar


def step() -> dict[str, Any]:
    """The arguments of `autopar.compile`, but for the cluster."""
    return {
        "model": nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8)),
        "example_inputs": (torch.randn(32, 64), torch.randint(0, 8, (32,))),
        "loss_fn": nn.functional.cross_entropy,
        "optimizer": functools.partial(torch.optim.AdamW, lr=1e-2),
    }


if __name__ == "__main__":
    program = autopar.compile(cluster=autopar.ClusterSpec.local(2), **step())
    print(program.save(Path("out") / "mlp", candidates=1))
