# Click prediction with bags of categories and dot interaction, after facebookresearch/dlrm's dlrm_s_pytorch.py.
import numpy as np
import torch
import torch.nn as nn
from torch.nn.parameter import Parameter

np.random.seed(123)
torch.manual_seed(123)


class DLRM_Net(nn.Module):
    def create_mlp(self, ln, sigmoid_layer):
        layers = nn.ModuleList()
        for i in range(0, ln.size - 1):
            n = ln[i]
            m = ln[i + 1]
            LL = nn.Linear(int(n), int(m), bias=True)
            # initialize the weights
            W = np.random.normal(0.0, np.sqrt(2 / (m + n)), size=(m, n))
            bt = np.random.normal(0.0, np.sqrt(1 / m), size=m)
            LL.weight.data = torch.tensor(W, dtype=torch.get_default_dtype(), requires_grad=True)
            LL.bias.data = torch.tensor(bt, dtype=torch.get_default_dtype(), requires_grad=True)
            layers.append(LL)
            if i == sigmoid_layer:
                layers.append(nn.Sigmoid())
            else:
                layers.append(nn.ReLU())
        return torch.nn.Sequential(*layers)

    def create_emb(self, m, ln):
        emb_l = nn.ModuleList()
        for i in range(0, ln.size):
            n = ln[i]
            EE = nn.EmbeddingBag(int(n), m, mode="sum")
            W = np.random.uniform(low=-np.sqrt(1 / n), high=np.sqrt(1 / n), size=(n, m))
            EE.weight = Parameter(torch.tensor(W, dtype=torch.get_default_dtype()), requires_grad=True)
            emb_l.append(EE)
        return emb_l

    def __init__(self, m_spa, ln_emb, ln_bot, ln_top, arch_interaction_itself=False):
        super(DLRM_Net, self).__init__()
        self.arch_interaction_itself = arch_interaction_itself
        self.emb_l = self.create_emb(m_spa, ln_emb)
        self.bot_l = self.create_mlp(ln_bot, -1)
        self.top_l = self.create_mlp(ln_top, ln_top.size - 2)

    def apply_mlp(self, x, layers):
        return layers(x)

    def apply_emb(self, lS_o, lS_i, emb_l):
        ly = []
        for k, sparse_index_group_batch in enumerate(lS_i):
            sparse_offset_group_batch = lS_o[k]
            E = emb_l[k]
            V = E(sparse_index_group_batch, sparse_offset_group_batch)
            ly.append(V)
        return ly

    def interact_features(self, x, ly):
        # concatenate dense and sparse features
        (batch_size, d) = x.shape
        T = torch.cat([x] + ly, dim=1).view((batch_size, -1, d))
        # perform a dot product
        Z = torch.bmm(T, torch.transpose(T, 1, 2))
        _, ni, nj = Z.shape
        offset = 1 if self.arch_interaction_itself else 0
        li = torch.tensor([i for i in range(ni) for j in range(i + offset)])
        lj = torch.tensor([j for i in range(nj) for j in range(i + offset)])
        Zflat = Z[:, li, lj]
        # concatenate dense features and interactions
        R = torch.cat([x] + [Zflat], dim=1)
        return R

    def forward(self, dense_x, lS_o, lS_i):
        x = self.apply_mlp(dense_x, self.bot_l)
        ly = self.apply_emb(lS_o, lS_i, self.emb_l)
        z = self.interact_features(x, ly)
        return self.apply_mlp(z, self.top_l)


ln_emb = np.array([20, 30, 10])
ln_bot = np.array([13, 32, 8])
num_fea = ln_emb.size + 1
num_int = (num_fea * (num_fea - 1)) // 2 + ln_bot[-1]
ln_top = np.array([num_int, 16, 1])
mini_batch_size, num_indices_per_lookup = 16, 3


def generate_batch():
    X = torch.rand(mini_batch_size, int(ln_bot[0]))
    lS_o = [torch.arange(mini_batch_size) * num_indices_per_lookup for _ in ln_emb]
    lS_i = [torch.randint(0, int(n), (mini_batch_size * num_indices_per_lookup,)) for n in ln_emb]
    T = torch.rand(mini_batch_size, 1).round()
    return X, lS_o, lS_i, T


dlrm = DLRM_Net(8, ln_emb, ln_bot, ln_top)
loss_fn = torch.nn.BCELoss(reduction="mean")
optimizer = torch.optim.SGD(dlrm.parameters(), lr=0.1)
losses = []
X, lS_o, lS_i, T = generate_batch()
for j in range(20):
    Z = dlrm(X, lS_o, lS_i)
    E = loss_fn(Z, T)
    optimizer.zero_grad()
    E.backward()
    optimizer.step()
    losses.append(E.item())
    X, lS_o, lS_i, T = generate_batch()
print("Finished training, loss {:.6f}".format(losses[-1]))
