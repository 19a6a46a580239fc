# Two moons, after micrograd's demo.ipynb, with torch's tensors: a max-margin loss and L2 regularization of all parameters.
import math
import random

import torch
from torch import nn

random.seed(1337)
torch.manual_seed(1337)
N = 64


def make_moons(n, noise):
    t = torch.rand(n) * math.pi
    upper = torch.arange(n) % 2 == 0
    x = torch.where(upper, torch.cos(t), 1 - torch.cos(t))
    y = torch.where(upper, torch.sin(t), 0.5 - torch.sin(t))
    return torch.stack([x, y], 1) + noise * torch.randn(n, 2), upper.long() * 2 - 1


class MLP(nn.Module):
    def __init__(self, nin, nouts):
        super().__init__()
        sz = [nin] + nouts
        self.layers = nn.ModuleList([nn.Linear(sz[i], sz[i + 1]) for i in range(len(nouts))])

    def forward(self, x):
        for i, layer in enumerate(self.layers):
            x = layer(x)
            if i < len(self.layers) - 1:
                x = x.relu()
        return x


model = MLP(2, [16, 16, 1])
print(model)
print("number of parameters", len(list(model.parameters())))
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)


def loss_fn(scores, yb):
    # svm "max-margin" loss
    losses = (1 + -yb * scores.squeeze(1)).relu()
    data_loss = losses.sum() * (1.0 / len(losses))
    # L2 regularization
    alpha = 1e-4
    reg_loss = alpha * sum((p * p).sum() for p in model.parameters())
    total_loss = data_loss + reg_loss
    # also get accuracy
    accuracy = ((yb > 0) == (scores.squeeze(1) > 0)).double().mean()
    return total_loss, accuracy


X, y = make_moons(N, 0.1)
losses, accuracies = [], []
for k in range(20):
    optimizer.param_groups[0]["lr"] = 1.0 - 0.9 * k / 100
    total_loss, acc = loss_fn(model(X), y)
    optimizer.zero_grad()
    total_loss.backward()
    optimizer.step()
    losses.append(total_loss.item())
    accuracies.append(acc.item())
    if k % 5 == 0:
        print(f"step {k} loss {total_loss.item()}, accuracy {acc.item() * 100}%")
