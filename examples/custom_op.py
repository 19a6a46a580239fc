"""Teach the compiler an op: one decorator, one line that says how it may be sharded.

`n d!, d! -> n d!` names the indices of operands and result: n may be sharded, d must stay whole (`!`), because the op
divides by a mean over it. The function stays one node of the graph, its gradient comes from autograd on each rank's block.
"""

import functools

import torch
from torch import nn

import autopar


@autopar.register_op("n d!, d! -> n d!")
def scaled_rms(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * scale


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 64)
        self.scale = nn.Parameter(torch.ones(64))
        self.down = nn.Linear(64, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(scaled_rms(self.up(x), self.scale))


torch.manual_seed(0)
model, batch = Model(), (torch.randn(32, 16), torch.randint(0, 8, (32,)))
program = autopar.compile(
    model,
    autopar.ClusterSpec.local(4),
    batch,
    loss_fn=nn.functional.cross_entropy,
    optimizer=functools.partial(torch.optim.AdamW, lr=1e-2),
    options=autopar.Options(mesh={"dp": 4}, strategy="dp"),
)
print("\n".join(line.strip() for line in program.source(0).splitlines() if "scaled_rms" in line))
print("losses", [round(float(loss), 4) for loss in program.run([batch], steps=5)])
result = autopar.check(program)
print(result)
print("written to", program.save("out/custom_op") / "user_ops.py")
if not result.ok:
    raise SystemExit("the sharded op does not compute what one device computes")
