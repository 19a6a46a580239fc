"""Train a character-level GPT with nanoGPT's loop."""

import argparse
import inspect
import math
import os

import torch

from gpt import GPT

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--float64", action="store_true")
parser.add_argument("--out", default="out-gpt")
parser.add_argument("--resume", action="store_true")
args = parser.parse_args()

batch_size, block_size = 8, 32
gradient_accumulation_steps = 2
eval_interval, eval_iters = 5, 2
learning_rate, min_lr, warmup_iters = 3e-3, 3e-4, 5
weight_decay, beta1, beta2, grad_clip = 1e-1, 0.9, 0.99, 1.0

torch.set_default_dtype(torch.float64 if args.float64 else torch.float32)
digits = 12 if args.float64 else 4
torch.manual_seed(1337)
os.makedirs(args.out, exist_ok=True)

text = inspect.getsource(argparse) + inspect.getsource(inspect)
chars = sorted(set(text))
tokens = torch.tensor([chars.index(c) for c in text[:50_000]])
data = {"train": tokens[: len(tokens) * 9 // 10], "val": tokens[len(tokens) * 9 // 10 :]}


def get_batch(split):
    ix = torch.randint(len(data[split]) - block_size, (batch_size,))
    x = torch.stack([data[split][i : i + block_size] for i in ix])
    y = torch.stack([data[split][i + 1 : i + 1 + block_size] for i in ix])
    return x, y


X, Y = get_batch("train")
model = GPT(len(chars), block_size)
optimizer = model.configure_optimizers(weight_decay, learning_rate, (beta1, beta2))
iter_num = 0
if args.resume:
    checkpoint = torch.load(os.path.join(args.out, "ckpt.pt"))
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    iter_num = checkpoint["iter_num"]


@torch.no_grad()
def estimate_loss():
    out = {}
    model.eval()
    for split in ["train", "val"]:
        losses = torch.zeros(eval_iters)
        for k in range(eval_iters):
            X, Y = get_batch(split)
            logits, loss = model(X, Y)
            losses[k] = loss.item()
        out[split] = losses.mean()
    model.train()
    return out


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    decay_ratio = min((it - warmup_iters) / max(args.steps - warmup_iters, 1), 1)
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * decay_ratio)) * (learning_rate - min_lr)


best_val_loss = 1e9
while True:
    lr = get_lr(iter_num)
    for param_group in optimizer.param_groups:
        param_group["lr"] = lr

    if iter_num % eval_interval == 0:
        losses = estimate_loss()
        print(f"step {iter_num}: train loss {losses['train']:.{digits}f}, val loss {losses['val']:.{digits}f}")
        if losses["val"] < best_val_loss:
            best_val_loss = losses["val"]
            if iter_num > 0:
                checkpoint = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "iter_num": iter_num}
                torch.save(checkpoint, os.path.join(args.out, "ckpt.pt"))

    for micro_step in range(gradient_accumulation_steps):
        logits, loss = model(X, Y)
        loss = loss / gradient_accumulation_steps
        X, Y = get_batch("train")
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)

    print(f"iter {iter_num}: loss {loss.item() * gradient_accumulation_steps:.{digits}f}, lr {lr:.4e}")
    iter_num += 1
    if iter_num > args.steps:
        break
