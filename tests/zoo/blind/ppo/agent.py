"""Policy, value, and the loss of proximal policy optimisation."""

import torch
from torch import nn
from torch.distributions import Categorical


class Agent(nn.Module):
    def __init__(self, observation_size, actions, width=352):
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Linear(observation_size, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width)
        )
        self.policy = nn.Linear(width, actions)
        self.value = nn.Linear(width, 1)

    def forward(self, observations):
        features = torch.tanh(self.trunk(observations))
        return self.policy(features), self.value(features).squeeze(-1)

    @torch.no_grad()
    def act(self, observations):
        scores, values = self(observations)
        chosen = Categorical(logits=scores, validate_args=False)
        actions = chosen.sample()
        return actions, chosen.log_prob(actions), values


def generalized_advantages(rewards, values, ended, last_value, gamma, smoothing):
    """Of (times, carts); also the returns that the value should predict."""
    advantages = torch.zeros_like(rewards)
    running = torch.zeros_like(last_value)
    following = last_value
    for time in reversed(range(len(rewards))):
        going_on = 1 - ended[time]
        error = rewards[time] + gamma * following * going_on - values[time]
        running = error + gamma * smoothing * going_on * running
        advantages[time] = running
        following = values[time]
    return advantages, advantages + values


def ppo_loss(agent, observations, actions, old_chances, advantages, returns, clip, entropy_weight):
    scores, values = agent(observations)
    chosen = Categorical(logits=scores, validate_args=False)
    ratio = (chosen.log_prob(actions) - old_chances).exp()
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    gained = torch.min(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)
    return -gained.mean() + 0.5 * (values - returns).square().mean() - entropy_weight * chosen.entropy().mean()
