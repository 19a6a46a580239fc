# Low-rank adapters on a frozen model, after microsoft/LoRA's loralib and its mark_only_lora_as_trainable.
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
vocab_size = 30
device = "cuda" if torch.cuda.is_available() else "cpu"

class LoRALinear(nn.Linear):
    # LoRA implemented in a dense layer
    def __init__(self, in_features, out_features, r=4, lora_alpha=8, **kwargs):
        nn.Linear.__init__(self, in_features, out_features, **kwargs)
        self.r = r
        if r > 0:
            self.lora_A = nn.Parameter(self.weight.new_zeros((r, in_features)))
            self.lora_B = nn.Parameter(self.weight.new_zeros((out_features, r)))
            self.scaling = lora_alpha / self.r
            # Freezing the pre-trained weight matrix
            self.weight.requires_grad = False
        self.reset_parameters()

    def reset_parameters(self):
        nn.Linear.reset_parameters(self)
        if hasattr(self, "lora_A"):
            # initialize A the same way as the default for nn.Linear and B to zero
            nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))
            nn.init.zeros_(self.lora_B)

    def forward(self, x: torch.Tensor):
        result = F.linear(x, self.weight, bias=self.bias)
        result += (x @ self.lora_A.transpose(0, 1) @ self.lora_B.transpose(0, 1)) * self.scaling
        return result


class Attention(nn.Module):
    def __init__(self, d_model, n_head):
        super().__init__()
        self.n_head = n_head
        self.q_proj = LoRALinear(d_model, d_model)
        self.k_proj = nn.Linear(d_model, d_model)
        self.v_proj = LoRALinear(d_model, d_model)
        self.o_proj = nn.Linear(d_model, d_model)

    def forward(self, x):
        B, T, C = x.size()
        q = self.q_proj(x).view(B, T, self.n_head, -1).transpose(1, 2)
        k = self.k_proj(x).view(B, T, self.n_head, -1).transpose(1, 2)
        v = self.v_proj(x).view(B, T, self.n_head, -1).transpose(1, 2)
        scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(q.size(-1))
        mask = torch.full((T, T), float("-inf"), device=x.device)
        mask = torch.triu(mask, diagonal=1)
        scores = scores + mask
        out = torch.matmul(F.softmax(scores, dim=-1), v)
        return self.o_proj(out.transpose(1, 2).reshape(B, T, C))


class LM(nn.Module):
    def __init__(self, d_model=32, n_layer=2, n_head=4):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, d_model)
        self.attn = nn.ModuleList([Attention(d_model, n_head) for _ in range(n_layer)])
        self.mlp = nn.ModuleList([nn.Sequential(nn.Linear(d_model, 64), nn.SiLU(), nn.Linear(64, d_model)) for _ in range(n_layer)])
        self.norm = nn.ModuleList([nn.LayerNorm(d_model) for _ in range(2 * n_layer)])
        self.head = nn.Linear(d_model, vocab_size, bias=False)

    def forward(self, x):
        x = self.embed(x)
        for i in range(len(self.attn)):
            x = x + self.attn[i](self.norm[2 * i](x))
            x = x + self.mlp[i](self.norm[2 * i + 1](x))
        return self.head(x)


def mark_only_lora_as_trainable(model):
    for n, p in model.named_parameters():
        if "lora_" not in n:
            p.requires_grad = False


model = LM().to(device)
mark_only_lora_as_trainable(model)
print("trainable:", sum(p.numel() for p in model.parameters() if p.requires_grad))
optimizer = torch.optim.AdamW(filter(lambda p: p.requires_grad, model.parameters()), lr=1e-2)
criterion = nn.CrossEntropyLoss()
losses = []
for i in range(20):
    tokens = torch.randint(0, vocab_size, (8, 13))
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    loss = criterion(model(inputs).transpose(1, 2), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
print(losses[0], "->", losses[-1])
