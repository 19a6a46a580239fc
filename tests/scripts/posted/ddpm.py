# Denoising diffusion, after lucidrains/denoising-diffusion-pytorch: the module draws its own steps and noise.
import math

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"


def exists(x):
    return x is not None


def default(val, d):
    if exists(val):
        return val
    return d() if callable(d) else d


def extract(a, t, x_shape):
    b, *_ = t.shape
    out = a.gather(-1, t)
    return out.reshape(b, *((1,) * (len(x_shape) - 1)))


class SinusoidalPosEmb(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.dim = dim

    def forward(self, x):
        device = x.device
        half_dim = self.dim // 2
        emb = math.log(10000) / (half_dim - 1)
        emb = torch.exp(torch.arange(half_dim, device=device) * -emb)
        emb = x[:, None] * emb[None, :]
        emb = torch.cat((emb.sin(), emb.cos()), dim=-1)
        return emb


class ResnetBlock(nn.Module):
    def __init__(self, dim, dim_out, time_emb_dim):
        super().__init__()
        self.mlp = nn.Sequential(nn.SiLU(), nn.Linear(time_emb_dim, dim_out * 2))
        self.conv1 = nn.Conv2d(dim, dim_out, 3, padding=1)
        self.norm = nn.GroupNorm(4, dim_out)
        self.conv2 = nn.Conv2d(dim_out, dim_out, 3, padding=1)
        self.res_conv = nn.Conv2d(dim, dim_out, 1) if dim != dim_out else nn.Identity()

    def forward(self, x, time_emb):
        time_emb = self.mlp(time_emb)[:, :, None, None]
        scale, shift = time_emb.chunk(2, dim=1)
        h = self.norm(self.conv1(x))
        h = F.silu(h * (scale + 1) + shift)
        return self.conv2(h) + self.res_conv(x)


class Unet(nn.Module):
    def __init__(self, dim, channels):
        super().__init__()
        self.init_conv = nn.Conv2d(channels, dim, 3, padding=1)
        self.time_mlp = nn.Sequential(SinusoidalPosEmb(dim), nn.Linear(dim, dim * 2), nn.GELU(), nn.Linear(dim * 2, dim * 2))
        self.downs = nn.ModuleList([ResnetBlock(dim, dim, dim * 2), ResnetBlock(dim, dim * 2, dim * 2)])
        self.pools = nn.ModuleList([nn.Conv2d(dim, dim, 4, 2, 1), nn.Identity()])
        self.mid = ResnetBlock(dim * 2, dim * 2, dim * 2)
        self.ups = nn.ModuleList([ResnetBlock(dim * 4, dim, dim * 2), ResnetBlock(dim * 2, dim, dim * 2)])
        self.final = nn.Conv2d(dim, channels, 1)

    def forward(self, x, time):
        x = self.init_conv(x)
        t = self.time_mlp(time)
        h = []
        for block, pool in zip(self.downs, self.pools):
            x = block(x, t)
            h.append(x)
            x = pool(x)
        x = self.mid(x, t)
        for i, block in enumerate(self.ups):
            x = torch.cat((x, h.pop()), dim=1)
            x = block(x, t)
            if i == 0:
                x = F.interpolate(x, scale_factor=2, mode="nearest")
        return self.final(x)


def cosine_beta_schedule(timesteps, s=0.008):
    steps = timesteps + 1
    t = torch.linspace(0, timesteps, steps, dtype=torch.float64) / timesteps
    alphas_cumprod = torch.cos((t + s) / (1 + s) * math.pi * 0.5) ** 2
    alphas_cumprod = alphas_cumprod / alphas_cumprod[0]
    betas = 1 - (alphas_cumprod[1:] / alphas_cumprod[:-1])
    return torch.clip(betas, 0, 0.999)


class GaussianDiffusion(nn.Module):
    def __init__(self, model, *, image_size, timesteps=100):
        super().__init__()
        self.model = model
        self.image_size = image_size
        betas = cosine_beta_schedule(timesteps)
        alphas = 1.0 - betas
        alphas_cumprod = torch.cumprod(alphas, dim=0)
        self.num_timesteps = int(betas.shape[0])

        # helper function to register buffer from float64 to the default dtype
        register_buffer = lambda name, val: self.register_buffer(name, val.to(torch.get_default_dtype()))
        register_buffer("betas", betas)
        register_buffer("sqrt_alphas_cumprod", torch.sqrt(alphas_cumprod))
        register_buffer("sqrt_one_minus_alphas_cumprod", torch.sqrt(1.0 - alphas_cumprod))
        snr = alphas_cumprod / (1 - alphas_cumprod)
        register_buffer("loss_weight", snr.clamp(max=5) / snr)

    def q_sample(self, x_start, t, noise=None):
        noise = default(noise, lambda: torch.randn_like(x_start))
        return (
            extract(self.sqrt_alphas_cumprod, t, x_start.shape) * x_start
            + extract(self.sqrt_one_minus_alphas_cumprod, t, x_start.shape) * noise
        )

    def p_losses(self, x_start, t, noise=None):
        b, c, h, w = x_start.shape
        noise = default(noise, lambda: torch.randn_like(x_start))
        x = self.q_sample(x_start=x_start, t=t, noise=noise)
        model_out = self.model(x, t)
        loss = F.mse_loss(model_out, noise, reduction="none")
        loss = loss.flatten(1).mean(dim=1)
        loss = loss * extract(self.loss_weight, t, loss.shape)
        return loss.mean()

    def forward(self, img, *args, **kwargs):
        b, c, h, w, device, img_size = *img.shape, img.device, self.image_size
        assert h == img_size and w == img_size, f"height and width of image must be {img_size}"
        t = torch.randint(0, self.num_timesteps, (b,), device=device).long()
        img = img * 2 - 1
        return self.p_losses(img, t, *args, **kwargs)


diffusion = GaussianDiffusion(Unet(dim=8, channels=1), image_size=8).to(device)
optimizer = torch.optim.Adam(diffusion.parameters(), lr=8e-5, betas=(0.9, 0.99))
training_images = torch.rand(160, 1, 8, 8)
losses = []
for step_num, img in enumerate(training_images.split(8)):
    loss = diffusion(img.to(device))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
print(f"loss: {sum(losses) / len(losses):.4f}")
