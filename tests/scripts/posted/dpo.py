# Direct preference optimization against a frozen reference inside the module, after eric-mitchell/direct-preference-optimization.
import copy

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
vocab_size, beta = 30, 0.1
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


def _get_batch_logps(logits, labels):
    assert logits.shape[:-1] == labels.shape
    labels = labels[:, 1:].clone()
    logits = logits[:, :-1, :]
    loss_mask = labels != -100
    # dummy token; we'll ignore the losses on these tokens later
    labels[labels == -100] = 0
    per_token_logps = torch.gather(logits.log_softmax(-1), dim=2, index=labels.unsqueeze(2)).squeeze(2)
    return (per_token_logps * loss_mask).sum(-1)


class DPO(nn.Module):
    def __init__(self, policy):
        super().__init__()
        self.policy = policy
        self.reference = copy.deepcopy(policy)
        for p in self.reference.parameters():
            p.requires_grad_(False)

    def concatenated_forward(self, model, chosen, rejected, chosen_labels, rejected_labels):
        all_logits = model(torch.cat([chosen, rejected], dim=0))
        all_logps = _get_batch_logps(all_logits, torch.cat([chosen_labels, rejected_labels], dim=0))
        return all_logps[: chosen.shape[0]], all_logps[chosen.shape[0] :]

    def forward(self, chosen, rejected, chosen_labels, rejected_labels):
        batch = (chosen, rejected, chosen_labels, rejected_labels)
        policy_chosen_logps, policy_rejected_logps = self.concatenated_forward(self.policy, *batch)
        with torch.no_grad():
            reference_chosen_logps, reference_rejected_logps = self.concatenated_forward(self.reference, *batch)
        pi_logratios = policy_chosen_logps - policy_rejected_logps
        ref_logratios = reference_chosen_logps - reference_rejected_logps
        losses = -F.logsigmoid(beta * (pi_logratios - ref_logratios))
        chosen_rewards = beta * (policy_chosen_logps - reference_chosen_logps).detach()
        rejected_rewards = beta * (policy_rejected_logps - reference_rejected_logps).detach()
        return losses.mean(), (chosen_rewards - rejected_rewards).mean()


def get_batch():
    prompt = torch.randint(0, vocab_size, (8, 4))
    sequences = [torch.cat([prompt, torch.randint(0, vocab_size, (8, 8))], 1) for _ in range(2)]
    labels = [ids.clone() for ids in sequences]
    for one in labels:
        one[:, :4] = -100
    return (*sequences, *labels)


trainer = DPO(LM(vocab_size)).to(device)
optimizer = torch.optim.RMSprop(trainer.policy.parameters(), lr=5e-4)
losses, margins = [], []
batch = get_batch()
for example_counter in range(20):
    loss, margin = trainer(*batch)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(trainer.policy.parameters(), 10.0)
    optimizer.step()
    losses.append(loss.item())
    margins.append(margin.item())
    batch = get_batch()
print(f"train loss {losses[-1]}, rewards_train/margins {margins[-1]}")
