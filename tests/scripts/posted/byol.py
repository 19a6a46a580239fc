# Learning representations against a moving average of the network (BYOL).
import copy

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
moving_average_decay = 0.9


def loss_fn(x, y):
    x = F.normalize(x, dim=-1, p=2)
    y = F.normalize(y, dim=-1, p=2)
    return 2 - 2 * (x * y).sum(dim=-1)


class EMA:
    def __init__(self, beta):
        self.beta = beta

    def update_average(self, old, new):
        if old is None:
            return new
        return old * self.beta + (1 - self.beta) * new


def update_moving_average(ema_updater, ma_model, current_model):
    for current_params, ma_params in zip(current_model.parameters(), ma_model.parameters()):
        old_weight, up_weight = ma_params.data, current_params.data
        ma_params.data = ema_updater.update_average(old_weight, up_weight)


def MLP(dim, projection_size, hidden_size=32):
    return nn.Sequential(
        nn.Linear(dim, hidden_size), nn.BatchNorm1d(hidden_size), nn.ReLU(inplace=True), nn.Linear(hidden_size, projection_size)
    )


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten())
        self.projector = MLP(8 * 4 * 4, 16)

    def forward(self, x):
        return self.projector(self.encoder(x))


class Online(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net
        self.predictor = MLP(16, 16)

    def forward(self, image_one, image_two):
        return self.predictor(self.net(image_one)), self.predictor(self.net(image_two))


def byol_loss(online_pred, target_proj_one, target_proj_two):
    online_pred_one, online_pred_two = online_pred
    loss_one = loss_fn(online_pred_one, target_proj_two.detach())
    loss_two = loss_fn(online_pred_two, target_proj_one.detach())
    return (loss_one + loss_two).mean()


online = Online(Net()).to(device)
target_encoder = copy.deepcopy(online.net)
for p in target_encoder.parameters():
    p.requires_grad = False
target_ema_updater = EMA(moving_average_decay)
opt = torch.optim.Adam(online.parameters(), lr=3e-4)


def sample_unlabelled_images():
    images = torch.rand(8, 3, 8, 8)
    return images + 0.1 * torch.randn_like(images), torch.flip(images, [-1])


losses = []
for _ in range(20):
    image_one, image_two = sample_unlabelled_images()
    with torch.no_grad():
        target_proj_one, target_proj_two = target_encoder(image_one), target_encoder(image_two)
    loss = byol_loss(online(image_one, image_two), target_proj_one, target_proj_two)
    opt.zero_grad()
    loss.backward()
    opt.step()
    update_moving_average(target_ema_updater, target_encoder, online.net)
    losses.append(loss.item())
print(losses[-1])
