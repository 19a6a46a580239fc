"""Learn representations without labels, by an average of the encoder as the target (BYOL)."""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--float64", action="store_true")
parser.add_argument("--out", default="out")
args = parser.parse_args()

torch.set_default_dtype(torch.float64 if args.float64 else torch.float32)
digits = 12 if args.float64 else 4
torch.manual_seed(0)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(12, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 8))

    def forward(self, x):
        return self.net(x)


class Online(nn.Module):
    def __init__(self, encoder):
        super().__init__()
        self.encoder, self.predictor = encoder, nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))

    def forward(self, one, other):
        return self.predictor(self.encoder(one)), self.predictor(self.encoder(other))


def byol_loss(predicted, z_one, z_other):
    one, other = predicted
    return 4 - 2 * F.cosine_similarity(one, z_other, -1).mean() - 2 * F.cosine_similarity(other, z_one, -1).mean()


def views():
    x = torch.randn(16, 12)
    return x + 0.1 * torch.randn(16, 12), x + 0.1 * torch.randn(16, 12)


online = Online(Encoder())
target = AveragedModel(online.encoder, multi_avg_fn=get_ema_multi_avg_fn(0.9))
optimizer = torch.optim.SGD(online.parameters(), lr=0.05, momentum=0.9)
data = [views() for _ in range(args.steps)]

for i, (one, other) in enumerate(data):
    with torch.no_grad():
        z_one, z_other = target(one), target(other)
    loss = byol_loss(online(one, other), z_one, z_other)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    target.update_parameters(online.encoder)
    print(f"step {i}: loss {loss.item():.{digits}f}")
