"""Distil a frozen teacher into a smaller student."""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--float64", action="store_true")
parser.add_argument("--out", default="out")
args = parser.parse_args()

torch.set_default_dtype(torch.float64 if args.float64 else torch.float32)
digits = 12 if args.float64 else 4
torch.manual_seed(0)


def classifier(width):
    return nn.Sequential(nn.Linear(16, width), nn.LayerNorm(width), nn.GELU(), nn.Dropout(0.0), nn.Linear(width, 5))


def distillation_loss(logits, y, teacher_logits, temperature=2.0, alpha=0.5):
    soft = F.kl_div(
        F.log_softmax(logits / temperature, -1), F.softmax(teacher_logits / temperature, -1), reduction="batchmean"
    )
    return alpha * F.cross_entropy(logits, y) + (1 - alpha) * temperature**2 * soft


teacher, student = classifier(64).eval(), classifier(16)
optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2)
data = [(torch.randn(16, 16), torch.randint(0, 5, (16,))) for _ in range(args.steps)]

for i, (x, y) in enumerate(data):
    with torch.no_grad():
        teacher_logits = teacher(x)
    loss = distillation_loss(student(x), y, teacher_logits)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {i}: loss {loss.item():.{digits}f}")
