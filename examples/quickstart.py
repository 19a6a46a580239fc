"""The shortest use: an MLP, four ranks, all of them inside this process."""

import functools

import torch
from torch import nn

import autopar

model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))
batch = (torch.randn(32, 64), torch.randint(0, 8, (32,)))
program = autopar.compile(
    model,
    autopar.ClusterSpec.local(4),
    batch,
    loss_fn=nn.functional.cross_entropy,
    optimizer=functools.partial(torch.optim.AdamW, lr=1e-2),
)
print(program.report())
print("losses", [round(float(loss), 4) for loss in program.run([batch], steps=5)])
print(autopar.check(program))
