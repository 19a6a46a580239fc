# A mixture density network, after tonyduan/mixture-density-network.
import torch
import torch.nn as nn
import torch.optim as optim
from torch.distributions import Normal, OneHotCategorical

torch.manual_seed(0)


class MixtureDensityNetwork(nn.Module):
    def __init__(self, dim_in, dim_out, n_components):
        super().__init__()
        self.pi_network = CategoricalNetwork(dim_in, n_components)
        self.normal_network = MixtureDiagNormalNetwork(dim_in, dim_out, n_components)

    def forward(self, x):
        return self.pi_network(x), self.normal_network(x)

    def loss(self, x, y):
        pi, normal = self.forward(x)
        loglik = normal.log_prob(y.unsqueeze(1).expand_as(normal.loc))
        loglik = torch.sum(loglik, dim=2)
        loss = -torch.logsumexp(torch.log(pi.probs) + loglik, dim=1)
        return loss


class MixtureDiagNormalNetwork(nn.Module):
    def __init__(self, in_dim, out_dim, n_components, hidden_dim=None):
        super().__init__()
        self.n_components = n_components
        if hidden_dim is None:
            hidden_dim = in_dim * 8
        self.network = nn.Sequential(
            nn.Linear(in_dim, hidden_dim), nn.ELU(), nn.Linear(hidden_dim, 2 * out_dim * n_components)
        )

    def forward(self, x):
        params = self.network(x)
        mean, sd = torch.split(params, params.shape[1] // 2, dim=1)
        mean = torch.stack(mean.split(mean.shape[1] // self.n_components, 1))
        sd = torch.stack(sd.split(sd.shape[1] // self.n_components, 1))
        return Normal(mean.transpose(0, 1), torch.exp(sd).transpose(0, 1))


class CategoricalNetwork(nn.Module):
    def __init__(self, in_dim, out_dim, hidden_dim=None):
        super().__init__()
        if hidden_dim is None:
            hidden_dim = in_dim * 8
        self.network = nn.Sequential(nn.Linear(in_dim, hidden_dim), nn.ELU(), nn.Linear(hidden_dim, out_dim))

    def forward(self, x):
        params = self.network(x)
        return OneHotCategorical(logits=params)


class Trained(nn.Module):
    # what the loop trains: the mean of the network's loss
    def __init__(self, mdn):
        super().__init__()
        self.mdn = mdn

    def forward(self, x, y):
        return self.mdn.loss(x, y).mean()


model = Trained(MixtureDensityNetwork(1, 1, n_components=3))
optimizer = optim.Adam(model.parameters(), lr=0.005)


def gen_data(n=64):
    y = torch.linspace(-1, 1, n) * 10
    x = 7 * torch.sin(0.75 * y) + 0.5 * y + torch.randn(n)
    return x[:, None], y[:, None]


losses = []
x, y = gen_data()
for i in range(20):
    optimizer.zero_grad()
    loss = model(x, y)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if i % 10 == 0:
        print(f"Iter: {i}\tLoss: {loss.data:.2f}")
