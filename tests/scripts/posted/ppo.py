# The clipped objective on minibatches of a rollout, after CleanRL's ppo.py.
import numpy as np
import torch
import torch.nn as nn
import torch.optim as optim
from torch.distributions.categorical import Categorical

seed, num_steps, num_minibatches, update_epochs = 1, 40, 4, 5
clip_coef, ent_coef, vf_coef, max_grad_norm = 0.2, 0.01, 0.5, 0.5
norm_adv, clip_vloss = True, True
np.random.seed(seed)
torch.manual_seed(seed)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def layer_init(layer, std=np.sqrt(2), bias_const=0.0):
    torch.nn.init.orthogonal_(layer.weight, std)
    torch.nn.init.constant_(layer.bias, bias_const)
    return layer


class Agent(nn.Module):
    def __init__(self, obs_dim, n_actions):
        super().__init__()
        self.critic = nn.Sequential(
            layer_init(nn.Linear(obs_dim, 64)),
            nn.Tanh(),
            layer_init(nn.Linear(64, 64)),
            nn.Tanh(),
            layer_init(nn.Linear(64, 1), std=1.0),
        )
        self.actor = nn.Sequential(
            layer_init(nn.Linear(obs_dim, 64)),
            nn.Tanh(),
            layer_init(nn.Linear(64, 64)),
            nn.Tanh(),
            layer_init(nn.Linear(64, n_actions), std=0.01),
        )

    def get_value(self, x):
        return self.critic(x)

    def get_action_and_value(self, x, action=None):
        logits = self.actor(x)
        probs = Categorical(logits=logits)
        if action is None:
            action = probs.sample()
        return action, probs.log_prob(action), probs.entropy(), self.critic(x)

    def forward(self, x, action=None):
        return self.get_action_and_value(x, action)


def ppo_loss(out, b_logprobs, b_advantages, b_returns, b_values):
    _, newlogprob, entropy, newvalue = out
    logratio = newlogprob - b_logprobs
    ratio = logratio.exp()

    with torch.no_grad():
        # calculate approx_kl http://joschu.net/blog/kl-approx.html
        approx_kl = ((ratio - 1) - logratio).mean()

    mb_advantages = b_advantages
    if norm_adv:
        mb_advantages = (mb_advantages - mb_advantages.mean()) / (mb_advantages.std() + 1e-8)

    # Policy loss
    pg_loss1 = -mb_advantages * ratio
    pg_loss2 = -mb_advantages * torch.clamp(ratio, 1 - clip_coef, 1 + clip_coef)
    pg_loss = torch.max(pg_loss1, pg_loss2).mean()

    # Value loss
    newvalue = newvalue.view(-1)
    if clip_vloss:
        v_loss_unclipped = (newvalue - b_returns) ** 2
        v_clipped = b_values + torch.clamp(newvalue - b_values, -clip_coef, clip_coef)
        v_loss_clipped = (v_clipped - b_returns) ** 2
        v_loss_max = torch.max(v_loss_unclipped, v_loss_clipped)
        v_loss = 0.5 * v_loss_max.mean()
    else:
        v_loss = 0.5 * ((newvalue - b_returns) ** 2).mean()

    entropy_loss = entropy.mean()
    return pg_loss - ent_coef * entropy_loss + v_loss * vf_coef, approx_kl


agent = Agent(4, 3).to(device)
optimizer = optim.Adam(agent.parameters(), lr=2.5e-4, eps=1e-5)

# a rollout
b_obs = torch.randn(num_steps, 4).to(device)
with torch.no_grad():
    b_actions, b_logprobs, _, b_values = agent.get_action_and_value(b_obs)
    b_values = b_values.flatten()
b_returns = torch.randn(num_steps)
b_advantages = b_returns - b_values

losses, kls = [], []
b_inds = np.arange(num_steps)
minibatch_size = num_steps // num_minibatches
for epoch in range(update_epochs):
    np.random.shuffle(b_inds)
    for start in range(0, num_steps, minibatch_size):
        mb_inds = b_inds[start : start + minibatch_size]
        mb = (b_logprobs[mb_inds], b_advantages[mb_inds], b_returns[mb_inds], b_values[mb_inds])
        loss, approx_kl = ppo_loss(agent(b_obs[mb_inds], b_actions.long()[mb_inds]), *mb)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(agent.parameters(), max_grad_norm)
        optimizer.step()
        losses.append(loss.item())
        kls.append(approx_kl.item())
print("approx_kl", kls[-1])
