"""Train a generator and its critic in turn, each with an optimizer of its own."""

import argparse

import torch
import torch.nn as nn

import autopar

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--float64", action="store_true")
parser.add_argument("--out", default="out-gan")
args = parser.parse_args()

torch.set_default_dtype(torch.float64 if args.float64 else torch.float32)
digits = 12 if args.float64 else 4
torch.manual_seed(0)
batch_size, nz = 16, 8
criterion = nn.BCEWithLogitsLoss()


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(nn.Linear(nz, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 2))

    def forward(self, z):
        return self.main(z)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))

    def forward(self, x):
        return self.main(x).view(-1)


class GAN(nn.Module):
    """The losses of both, of noise and real samples."""

    def __init__(self, netG, netD):
        super().__init__()
        self.netG, self.netD = netG, netD

    def forward(self, noise, real=None):
        if real is None:  # the generator's
            output = self.netD(self.netG(noise))
            return criterion(output, torch.ones_like(output))
        output, fake = self.netD(real), self.netD(self.netG(noise).detach())
        return criterion(output, torch.ones_like(output)) + criterion(fake, torch.zeros_like(fake))


def real_batch():
    """Points of a noisy circle."""
    angle = 2 * torch.pi * torch.rand(batch_size)
    return torch.stack([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn(batch_size, 2)


netG, netD = Generator(), Discriminator()
gan = GAN(netG, netD)
optimizerD = torch.optim.Adam(netD.parameters(), lr=2e-2, betas=(0.5, 0.999))
optimizerG = torch.optim.Adam(netG.parameters(), lr=1e-2, betas=(0.5, 0.999))
real, noise = real_batch(), torch.randn(batch_size, nz)
critic = autopar.Entry((noise, real), module=gan, train=True, optimizer=optimizerD)
netD.requires_grad_(False)
step = autopar.parallelize(gan, "here", (noise,), optimizer=optimizerG, entries={"critic": critic})

for i in range(args.steps):
    errD = step.entry("critic")(noise, real)

    noise = torch.randn(batch_size, nz)
    errG = step(noise)

    print(f"[{i}/{args.steps}] Loss_D: {errD.item():.{digits}f} Loss_G: {errG.item():.{digits}f}")
    real, noise = real_batch(), torch.randn(batch_size, nz)
