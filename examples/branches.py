"""Branches side by side: camera, lidar and radar encoders, a fusion module that reads all three, and two heads.

Four machines of two ranks each, joined by a slow network. One mesh over all ranks would send every gradient over it, and
a chain of stages would let the encoders wait for each other. The planner may give each encoder ranks of its own: they
work at the same time, and only what they found crosses the network.
"""

import functools

import torch
from torch import Tensor, nn

import autopar


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class Encoder(nn.Module):
    """The readings of a sensor, (batch, readings, channels), in one vector of the common width."""

    def __init__(self, channels: int, width: int, blocks: int, common: int) -> None:
        super().__init__()
        self.stem = nn.Linear(channels, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.out = nn.Linear(width, common)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x.mean(dim=1))


class Driving(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.camera = Encoder(12, width, 4, width)
        self.lidar = Encoder(8, width, 3, width)
        self.radar = Encoder(4, width, 2, width)
        self.fusion = nn.Sequential(nn.Linear(3 * width, 8 * width), nn.ReLU(), nn.Linear(8 * width, 4 * width))
        self.boxes = nn.Sequential(nn.Linear(4 * width, 4 * width), nn.ReLU(), nn.Linear(4 * width, 4))
        self.kinds = nn.Sequential(nn.Linear(4 * width, 4 * width), nn.ReLU(), nn.Linear(4 * width, 8))

    def forward(self, camera: Tensor, lidar: Tensor, radar: Tensor) -> tuple[Tensor, Tensor]:
        seen = torch.cat((self.camera(camera), self.lidar(lidar), self.radar(radar)), dim=-1)
        fused = self.fusion(seen)
        return self.boxes(fused), self.kinds(fused)


def loss(output: tuple[Tensor, Tensor], boxes: Tensor, kinds: Tensor) -> Tensor:
    return nn.functional.mse_loss(output[0], boxes) + nn.functional.cross_entropy(output[1], kinds)


torch.manual_seed(0)
model = Driving()
n = 16
batch = (
    torch.randn(n, 16, 12),
    torch.randn(n, 16, 8),
    torch.randn(n, 16, 4),
    torch.randn(n, 4),
    torch.randint(0, 8, (n,)),
)
cluster = autopar.ClusterSpec.homogeneous(
    devices=8,
    device="cpu",
    devices_per_node=2,
    intra_bandwidth_Bps=4e9,
    inter_bandwidth_Bps=1e8,
    intra_latency_s=5e-6,
    inter_latency_s=50e-6,
)
program = autopar.compile(model, cluster, batch, loss_fn=loss, optimizer=functools.partial(torch.optim.AdamW, lr=1e-3))
print(program.report())
for stage in program.plan.stages:
    first, last = stage.calls
    modules = dict.fromkeys(call.path.split(".")[0] or "loss" for call in program.ir.calls[first:last])
    ranks = range(stage.mesh.offset, stage.mesh.offset + stage.mesh.size)
    print(f"ranks {', '.join(map(str, ranks)):>10} as {stage.mesh!s:>10}: {', '.join(modules)}")
checked = autopar.check(program)
print(checked)
if not checked.ok:
    raise SystemExit("the program does not compute what one device computes")
