"""Models with branches for tests: three encoders of different cost, a fusion that reads all of them, two heads."""

import torch
from torch import Tensor, nn

from tests.zoo.models import ORIGIN


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class Encoder(nn.Module):
    def __init__(self, channels: int, width: int, blocks: int) -> None:
        super().__init__()
        self.stem = nn.Linear(channels, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x.mean(dim=1))


class Driving(nn.Module):
    """camera, lidar, radar: (batch, readings, 12, 8, 4).

    tied: the first lidar block is the first camera block, and the heads read the lidar encoder as well.
    """

    def __init__(self, width: int = 64, blocks: tuple[int, int, int] = (4, 3, 2), tied: bool = False) -> None:
        super().__init__()
        self.camera = Encoder(12, width, blocks[0])
        self.lidar = Encoder(8, width, blocks[1])
        self.radar = Encoder(4, width, blocks[2])
        self.fusion = nn.Sequential(nn.Linear(3 * width, 8 * width), nn.ReLU(), nn.Linear(8 * width, 4 * width))
        self.boxes = nn.Sequential(nn.Linear(4 * width, 4 * width), nn.ReLU(), nn.Linear(4 * width, 4))
        self.kinds = nn.Sequential(nn.Linear(4 * width, 4 * width), nn.ReLU(), nn.Linear(4 * width, 8))
        ORIGIN[self] = Driving, width, blocks, tied
        self.tied = tied
        if tied:
            self.lidar.blocks[0] = self.camera.blocks[0]

    def forward(self, camera: Tensor, lidar: Tensor, radar: Tensor) -> tuple[Tensor, Tensor]:
        near = self.lidar(lidar)
        seen = self.camera(camera), near, self.radar(radar)
        fused = self.fusion(torch.cat(seen, dim=-1))
        if self.tied:
            fused = fused + near.repeat(1, 4)
        return self.boxes(fused), self.kinds(fused)


def driving_loss(output: tuple[Tensor, Tensor], boxes: Tensor, kinds: Tensor) -> Tensor:
    return nn.functional.mse_loss(output[0], boxes) + nn.functional.cross_entropy(output[1], kinds)


def driving_batch(n: int = 8) -> tuple[Tensor, ...]:
    return (
        torch.randn(n, 16, 12),
        torch.randn(n, 16, 8),
        torch.randn(n, 16, 4),
        torch.randn(n, 4),
        torch.randint(0, 8, (n,)),
    )
