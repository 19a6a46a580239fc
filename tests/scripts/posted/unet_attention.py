# A U-Net with attention that predicts noise; the loop draws noise and steps (the annotated diffusion model).
import math

import torch
import torch.nn.functional as F
from torch import einsum, nn

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
timesteps = 50
betas = torch.linspace(0.0001, 0.02, timesteps)
alphas_cumprod = torch.cumprod(1.0 - betas, axis=0)
sqrt_alphas_cumprod = torch.sqrt(alphas_cumprod)
sqrt_one_minus_alphas_cumprod = torch.sqrt(1.0 - alphas_cumprod)


class Residual(nn.Module):
    def __init__(self, fn):
        super().__init__()
        self.fn = fn

    def forward(self, x, *args, **kwargs):
        return self.fn(x, *args, **kwargs) + x


class PreNorm(nn.Module):
    def __init__(self, dim, fn):
        super().__init__()
        self.fn = fn
        self.norm = nn.GroupNorm(1, dim)

    def forward(self, x):
        return self.fn(self.norm(x))


class Attention(nn.Module):
    def __init__(self, dim, heads=2, dim_head=8):
        super().__init__()
        self.scale = dim_head**-0.5
        self.heads = heads
        hidden_dim = dim_head * heads
        self.to_qkv = nn.Conv2d(dim, hidden_dim * 3, 1, bias=False)
        self.to_out = nn.Conv2d(hidden_dim, dim, 1)

    def forward(self, x):
        b, c, h, w = x.shape
        qkv = self.to_qkv(x).chunk(3, dim=1)
        q, k, v = map(lambda t: t.reshape(b, self.heads, -1, h * w), qkv)
        q = q * self.scale
        sim = einsum("b h d i, b h d j -> b h i j", q, k)
        sim = sim - sim.amax(dim=-1, keepdim=True).detach()
        attn = sim.softmax(dim=-1)
        out = einsum("b h i j, b h d j -> b h i d", attn, v)
        out = out.permute(0, 1, 3, 2).reshape(b, -1, h, w)
        return self.to_out(out)


class LinearAttention(nn.Module):
    def __init__(self, dim, heads=2, dim_head=8):
        super().__init__()
        self.scale = dim_head**-0.5
        self.heads = heads
        hidden_dim = dim_head * heads
        self.to_qkv = nn.Conv2d(dim, hidden_dim * 3, 1, bias=False)
        self.to_out = nn.Sequential(nn.Conv2d(hidden_dim, dim, 1), nn.GroupNorm(1, dim))

    def forward(self, x):
        b, c, h, w = x.shape
        qkv = self.to_qkv(x).chunk(3, dim=1)
        q, k, v = map(lambda t: t.reshape(b, self.heads, -1, h * w), qkv)
        q = q.softmax(dim=-2)
        k = k.softmax(dim=-1)
        q = q * self.scale
        context = torch.einsum("b h d n, b h e n -> b h d e", k, v)
        out = torch.einsum("b h d e, b h d n -> b h e n", context, q)
        out = out.reshape(b, -1, h, w)
        return self.to_out(out)


class WeightStandardizedConv2d(nn.Conv2d):
    def forward(self, x):
        eps = 1e-5 if x.dtype == torch.float32 else 1e-3
        weight = self.weight
        mean = weight.mean(dim=(1, 2, 3), keepdim=True)
        var = weight.var(dim=(1, 2, 3), keepdim=True, unbiased=False)
        normalized_weight = (weight - mean) * (var + eps).rsqrt()
        return F.conv2d(x, normalized_weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


class Block(nn.Module):
    def __init__(self, dim, dim_out, time_dim):
        super().__init__()
        self.proj = WeightStandardizedConv2d(dim, dim_out, 3, padding=1)
        self.norm = nn.GroupNorm(4, dim_out)
        self.act = nn.SiLU()
        self.mlp = nn.Linear(time_dim, dim_out)

    def forward(self, x, t):
        x = self.norm(self.proj(x))
        x = x + self.mlp(t)[:, :, None, None]
        return self.act(x)


class Unet(nn.Module):
    def __init__(self, dim, channels=1):
        super().__init__()
        self.dim = dim
        self.init_conv = nn.Conv2d(channels, dim, 7, padding=3)
        self.time_mlp = nn.Sequential(nn.Linear(dim, dim * 4), nn.GELU(), nn.Linear(dim * 4, dim * 4))
        self.downs = nn.ModuleList([])
        self.ups = nn.ModuleList([])
        in_out = [(dim, dim), (dim, dim * 2)]
        for i, (dim_in, dim_out) in enumerate(in_out):
            is_last = i == len(in_out) - 1
            self.downs.append(
                nn.ModuleList([
                    Block(dim_in, dim_in, dim * 4),
                    Residual(PreNorm(dim_in, LinearAttention(dim_in))),
                    nn.Conv2d(dim_in, dim_out, 3, padding=1) if is_last else nn.Conv2d(dim_in, dim_out, 4, 2, 1),
                ])
            )
        self.mid_block1 = Block(dim * 2, dim * 2, dim * 4)
        self.mid_attn = Residual(PreNorm(dim * 2, Attention(dim * 2)))
        for i, (dim_in, dim_out) in enumerate(reversed(in_out)):
            is_last = i == len(in_out) - 1
            self.ups.append(
                nn.ModuleList([
                    Block(dim_out + dim_in, dim_out, dim * 4),
                    nn.Conv2d(dim_out, dim_in, 3, padding=1)
                    if is_last
                    else nn.Sequential(nn.Upsample(scale_factor=2, mode="nearest"), nn.Conv2d(dim_out, dim_in, 3, padding=1)),
                ])
            )
        self.final_conv = nn.Conv2d(dim, channels, 1)

    def forward(self, x, time):
        x = self.init_conv(x)
        half = self.dim // 2
        freqs = torch.exp(torch.arange(half, device=x.device) * -(math.log(10000) / (half - 1)))
        args = time[:, None] * freqs[None, :]
        t = self.time_mlp(torch.cat((args.sin(), args.cos()), dim=-1))
        h = []
        for block, attn, downsample in self.downs:
            x = block(x, t)
            x = attn(x)
            h.append(x)
            x = downsample(x)
        x = self.mid_block1(x, t)
        x = self.mid_attn(x)
        for block, upsample in self.ups:
            x = torch.cat((x, h.pop()), dim=1)
            x = block(x, t)
            x = upsample(x)
        return self.final_conv(x)


def q_sample(x_start, t, noise):
    shape = (t.shape[0],) + (1,) * (x_start.dim() - 1)
    return (
        sqrt_alphas_cumprod.gather(-1, t).reshape(shape) * x_start
        + sqrt_one_minus_alphas_cumprod.gather(-1, t).reshape(shape) * noise
    )


model = Unet(dim=8).to(device)
print(sum(p.numel() for p in model.parameters()), "parameters")
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
losses = []
for step_num in range(20):
    optimizer.zero_grad()
    batch = torch.rand(8, 1, 8, 8).to(device)
    t = torch.randint(0, timesteps, (batch.shape[0],), device=device).long()
    noise = torch.randn_like(batch)
    x_noisy = q_sample(batch, t, noise)
    loss = F.smooth_l1_loss(model(x_noisy, t), noise)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if step_num % 10 == 0:
        print("Loss:", loss.item())
