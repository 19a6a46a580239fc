"""Direct preference optimization of a language model beside a frozen reference."""

import argparse
import copy

import torch
import torch.nn as nn
import torch.nn.functional as F

from gpt import GPT

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--float64", action="store_true")
parser.add_argument("--out", default="out")
args = parser.parse_args()

torch.set_default_dtype(torch.float64 if args.float64 else torch.float32)
digits = 12 if args.float64 else 4
torch.manual_seed(0)
beta, vocab, length = 0.1, 48, 24


class LogProbs(nn.Module):
    """Log-probabilities of answers, (rows, 2), of tokens (rows, 2, length): the chosen answers, and the rejected ones."""

    def __init__(self, lm):
        super().__init__()
        self.lm = lm

    def forward(self, ids, mask):
        rows, _, length = ids.shape
        logits, _ = self.lm(ids.view(rows * 2, length))
        logps = F.log_softmax(logits[:, :-1], -1).gather(-1, ids.view(rows * 2, length)[:, 1:, None]).squeeze(-1)
        return (logps * mask.view(rows * 2, length)[:, 1:]).sum(-1).view(rows, 2)


def dpo_loss(logps, reference_logps):
    margins = (logps - reference_logps)[:, 0] - (logps - reference_logps)[:, 1]
    return -F.logsigmoid(beta * margins).mean(), margins.mean()


def batch():
    ids = torch.randint(0, vocab, (8, 2, length))
    return ids, (torch.arange(length) >= torch.randint(4, 12, (8, 1, 1))).expand(8, 2, length).to(
        torch.get_default_dtype()
    )


policy = LogProbs(GPT(vocab, length, layers=1, width=32))
reference = copy.deepcopy(policy).eval().requires_grad_(False)
optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
data = [batch() for _ in range(args.steps)]

for i, (ids, mask) in enumerate(data):
    with torch.no_grad():
        reference_logps = reference(ids, mask)
    loss, margin = dpo_loss(policy(ids, mask), reference_logps)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {i}: loss {loss.item():.{digits}f} margin {margin.item():.{digits}f}")
