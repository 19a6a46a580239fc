# Group relative policy optimization on sampled completions, after TRL's GRPOTrainer.
import copy

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
vocab_size, num_generations, num_prompts, prompt_len, completion_len = 30, 4, 2, 4, 8
beta, epsilon, eos_token_id = 0.04, 0.2, 1
device = "cuda" if torch.cuda.is_available() else "cpu"


class Block(nn.Module):
    def __init__(self, d_model, n_head):
        super().__init__()
        self.ln1 = nn.LayerNorm(d_model)
        self.attn = nn.MultiheadAttention(d_model, n_head, batch_first=True)
        self.ln2 = nn.LayerNorm(d_model)
        self.mlp = nn.Sequential(nn.Linear(d_model, 4 * d_model), nn.GELU(), nn.Linear(4 * d_model, d_model))

    def forward(self, x):
        T = x.size(1)
        mask = torch.triu(torch.ones(T, T, dtype=torch.bool, device=x.device), diagonal=1)
        h = self.ln1(x)
        x = x + self.attn(h, h, h, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp(self.ln2(x))


class LM(nn.Module):
    def __init__(self, vocab_size, d_model=32, n_layer=2, n_head=4, max_len=64):
        super().__init__()
        self.wte = nn.Embedding(vocab_size, d_model)
        self.wpe = nn.Parameter(torch.randn(max_len, d_model) * 0.02)
        self.blocks = nn.ModuleList([Block(d_model, n_head) for _ in range(n_layer)])
        self.ln_f = nn.LayerNorm(d_model)
        self.head = nn.Linear(d_model, vocab_size, bias=False)

    def forward(self, input_ids):
        x = self.wte(input_ids) + self.wpe[: input_ids.size(1)]
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln_f(x))


class Policy(nn.Module):
    def __init__(self, lm):
        super().__init__()
        self.lm = lm

    def forward(self, input_ids):
        # Get the per-token log probabilities for the completions
        logits = self.lm(input_ids)
        logits = logits[:, :-1, :]  # exclude the last logit: it corresponds to the next token pred
        logits = logits[:, -completion_len:]
        logps = torch.gather(logits.log_softmax(-1), dim=-1, index=input_ids[:, -completion_len:].unsqueeze(-1)).squeeze(-1)
        return logps


def grpo_loss(per_token_logps, old_per_token_logps, ref_per_token_logps, advantages, completion_mask):
    # Compute the KL divergence between the model and the reference model
    per_token_kl = torch.exp(ref_per_token_logps - per_token_logps) - (ref_per_token_logps - per_token_logps) - 1
    coef_1 = torch.exp(per_token_logps - old_per_token_logps)
    coef_2 = torch.clamp(coef_1, 1 - epsilon, 1 + epsilon)
    per_token_loss1 = coef_1 * advantages.unsqueeze(1)
    per_token_loss2 = coef_2 * advantages.unsqueeze(1)
    per_token_loss = -torch.min(per_token_loss1, per_token_loss2)
    per_token_loss = per_token_loss + beta * per_token_kl
    loss = ((per_token_loss * completion_mask).sum(-1) / completion_mask.sum(-1).clamp(min=1.0)).mean()
    mean_kl = ((per_token_kl * completion_mask).sum(dim=1) / completion_mask.sum(dim=1)).mean()
    return loss, mean_kl


def score(prompt_completion_ids):
    completion_ids = prompt_completion_ids[:, prompt_len:]
    # Mask everything after the first EOS token
    is_eos = completion_ids == eos_token_id
    eos_idx = torch.full((is_eos.size(0),), is_eos.size(1), dtype=torch.long)
    eos_idx[is_eos.any(dim=1)] = is_eos.int().argmax(dim=1)[is_eos.any(dim=1)]
    sequence_indices = torch.arange(is_eos.size(1)).expand(is_eos.size(0), -1)
    completion_mask = (sequence_indices <= eos_idx.unsqueeze(1)).int()
    rewards = (completion_ids % 2 == 0).double().mean(1)
    mean_grouped_rewards = rewards.view(-1, num_generations).mean(dim=1).repeat_interleave(num_generations, dim=0)
    std_grouped_rewards = rewards.view(-1, num_generations).std(dim=1).repeat_interleave(num_generations, dim=0)
    advantages = (rewards - mean_grouped_rewards) / (std_grouped_rewards + 1e-4)
    with torch.no_grad():
        ref = ref_model(prompt_completion_ids)
    return advantages, ref, completion_mask


model = Policy(LM(vocab_size)).to(device)
ref_model = copy.deepcopy(model).eval()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
ids = torch.randint(0, vocab_size, (num_prompts * num_generations, prompt_len + completion_len))
losses, kls = [], []
for step_num in range(20):
    advantages, ref_per_token_logps, completion_mask = score(ids)
    old_per_token_logps = ref_per_token_logps
    loss, kl = grpo_loss(model(ids), old_per_token_logps, ref_per_token_logps, advantages, completion_mask)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    kls.append(kl.item())
    ids = torch.randint(0, vocab_size, (num_prompts * num_generations, prompt_len + completion_len))
print({"loss": losses[-1], "kl": kls[-1]})
