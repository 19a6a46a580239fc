# Several heads on one trunk, their losses weighed by learned uncertainties (Kendall et al.).
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TASKS = {"depth": 1, "normal": 3, "segment": 5}


class MultiTaskNet(nn.Module):
    def __init__(self, hidden=32):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(16, hidden), nn.ReLU(), nn.BatchNorm1d(hidden), nn.Linear(hidden, hidden), nn.ReLU())
        self.heads = nn.ModuleDict({name: nn.Linear(hidden, size) for name, size in TASKS.items()})
        self.log_vars = nn.Parameter(torch.zeros(len(TASKS)))
        for m in self.modules():
            if isinstance(m, nn.Linear):
                nn.init.kaiming_normal_(m.weight, nonlinearity="relu")
                m.bias.data.fill_(0.01)

    def forward(self, x):
        features = self.trunk(x)
        outputs = {name: head(features) for name, head in self.heads.items()}
        outputs["log_vars"] = self.log_vars
        return outputs


def multi_task_loss(outputs, targets):
    losses = []
    losses.append(F.l1_loss(outputs["depth"].squeeze(-1), targets["depth"]))
    losses.append(1 - F.cosine_similarity(outputs["normal"], targets["normal"]).mean())
    losses.append(F.cross_entropy(outputs["segment"], targets["segment"]))
    total = 0
    for i, task_loss in enumerate(losses):
        total = total + torch.exp(-outputs["log_vars"][i]) * task_loss + outputs["log_vars"][i]
    return total


def make_batch(n=16):
    x = torch.randn(n, 16)
    targets = {
        "depth": x[:, 0].abs(),
        "normal": F.normalize(x[:, 1:4], dim=-1),
        "segment": torch.randint(0, 5, (n,)),
    }
    return x.to(device), {k: v.to(device) for k, v in targets.items()}


net = MultiTaskNet().to(device)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
history = []
x, targets = make_batch()
for it in range(20):
    loss = multi_task_loss(net(x), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append(loss.item())
    x, targets = make_batch()
print("final", history[-1])
