# A neural ODE with fixed steps, after torchdiffeq's ode_demo.py with its solver written out.
import torch
import torch.nn as nn
import torch.optim as optim

torch.manual_seed(0)
method, data_size, batch_time, batch_size, niters = "rk4", 100, 6, 16, 20
device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
true_y0 = torch.tensor([[2.0, 0.0]]).to(device)
t = torch.linspace(0.0, 25.0, data_size).to(device)
true_A = torch.tensor([[-0.1, 2.0], [-2.0, -0.1]]).to(device)


def euler_step(func, t, dt, y):
    return dt * func(t, y)


def rk4_step(func, t, dt, y):
    k1 = func(t, y)
    k2 = func(t + dt / 2, y + dt * k1 / 2)
    k3 = func(t + dt / 2, y + dt * k2 / 2)
    k4 = func(t + dt, y + dt * k3)
    return dt * (k1 + 2 * k2 + 2 * k3 + k4) / 6


def odeint(func, y0, t, method="rk4"):
    step = {"euler": euler_step, "rk4": rk4_step}[method]
    solution = [y0]
    y = y0
    for t0, t1 in zip(t[:-1], t[1:]):
        y = y + step(func, t0, t1 - t0, y)
        solution.append(y)
    return torch.stack(solution)


class Lambda(nn.Module):
    def forward(self, t, y):
        return torch.mm(y**3, true_A)


with torch.no_grad():
    true_y = odeint(Lambda(), true_y0, t)


def get_batch():
    s = torch.randint(0, data_size - batch_time, (batch_size,))
    batch_y0 = true_y[s]  # (M, D)
    batch_t = t[:batch_time]  # (T)
    batch_y = torch.stack([true_y[s + i] for i in range(batch_time)], dim=0)  # (T, M, D)
    return batch_y0.to(device), batch_t.to(device), batch_y.to(device)


class ODEFunc(nn.Module):
    def __init__(self):
        super(ODEFunc, self).__init__()
        self.net = nn.Sequential(nn.Linear(2, 50), nn.Tanh(), nn.Linear(50, 2))
        for m in self.net.modules():
            if isinstance(m, nn.Linear):
                nn.init.normal_(m.weight, mean=0, std=0.1)
                nn.init.constant_(m.bias, val=0)
        self.nfe = 0

    def forward(self, t, y):
        return self.net(y**3)


class ODEBlock(nn.Module):
    def __init__(self, func):
        super().__init__()
        self.func = func

    def forward(self, y0, t):
        return odeint(self.func, y0, t, method=method)


model = ODEBlock(ODEFunc()).to(device)
optimizer = optim.RMSprop(model.parameters(), lr=1e-3)
losses = []
for itr in range(1, niters + 1):
    optimizer.zero_grad()
    batch_y0, batch_t, batch_y = get_batch()
    pred_y = model(batch_y0, batch_t)
    loss = torch.mean(torch.abs(pred_y - batch_y))
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if itr % 10 == 0:
        print("Iter {:04d} | Total Loss {:.6f}".format(itr, loss.item()))
