"""Proximal policy optimisation on several copies of a small made-up environment."""

import argparse

import numpy as np
import torch
from torch import nn
from torch.distributions import Categorical

OBSERVATION, ACTIONS = 16, 4


class Drift:
    """Stay near the origin while drifting."""

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)
        self.reset()

    def reset(self):
        self.time = 0
        self.position = self.rng.normal(size=OBSERVATION).astype(np.float32)
        return self.position

    def step(self, action):
        push = np.zeros(OBSERVATION, dtype=np.float32)
        push[action * 4 : action * 4 + 4] = -0.2 * np.sign(self.position[action * 4 : action * 4 + 4])
        self.position = 0.99 * self.position + push
        self.time += 1
        reward, done = -float(np.abs(self.position).mean()), self.time >= 64
        return (self.reset() if done else self.position), reward, done


class ActorCritic(nn.Module):
    def __init__(self, width=128):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(OBSERVATION, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        self.policy = nn.Linear(width, ACTIONS)
        self.value = nn.Linear(width, 1)

    def forward(self, observations):
        hidden = self.body(observations)
        return Categorical(logits=self.policy(hidden)), self.value(hidden).squeeze(-1)


@torch.no_grad()
def act_one_by_one(model, observations):
    """Ask the policy for each environment."""
    actions, chances, values = [], [], []
    for observation in observations:
        distribution, value = model(torch.from_numpy(observation).unsqueeze(0))  # planted
        action = distribution.sample()  # planted
        actions.append(action)
        chances.append(distribution.log_prob(action))  # planted
        values.append(value)
    return torch.cat(actions), torch.cat(chances), torch.cat(values)


@torch.no_grad()
def act(model, observations):
    """Ask the policy once for all environments."""
    distribution, values = model(torch.from_numpy(np.stack(observations)))
    actions = distribution.sample()
    return actions, distribution.log_prob(actions), values


def collect(envs, observations, model, length, choose):
    """A rollout: stacked observations, actions, log probabilities, values, rewards, ends."""
    rows = []
    for _ in range(length):
        actions, chances, values = choose(model, observations)
        seen = torch.from_numpy(np.stack(observations))
        results = [env.step(action) for env, action in zip(envs, actions.tolist(), strict=True)]
        observations = [observation for observation, _, _ in results]
        rewards = torch.tensor([reward for _, reward, _ in results])
        ends = torch.tensor([float(done) for _, _, done in results])
        rows.append((seen, actions, chances, values, rewards, ends))
    return [torch.stack(column) for column in zip(*rows, strict=True)], observations


def advantages(rewards, values, ends, last, gamma, decay):
    """Generalised advantage estimation."""
    result = torch.zeros_like(rewards)
    running = torch.zeros(rewards.shape[1])
    for time in reversed(range(len(rewards))):
        following = last if time == len(rewards) - 1 else values[time + 1]
        delta = rewards[time] + gamma * following * (1 - ends[time]) - values[time]
        running = delta + gamma * decay * (1 - ends[time]) * running
        result[time] = running
    return result


def update(model, optimizer, rollout, advantage, clip):
    seen, actions, chances, values, _, _ = (column.flatten(0, 1) for column in rollout)
    advantage = advantage.flatten()
    distribution, estimate = model(seen)
    ratio = (distribution.log_prob(actions) - chances).exp()
    scaled = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    policy_loss = -torch.min(ratio * scaled, ratio.clamp(1 - clip, 1 + clip) * scaled).mean()
    value_loss = (estimate - (values + advantage)).pow(2).mean()
    loss = policy_loss + 0.5 * value_loss - 0.01 * distribution.entropy().mean()
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    return loss.detach()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--envs", type=int, default=16)
    parser.add_argument("--rollout", type=int, default=16)
    parser.add_argument("--iterations", type=int, default=50)
    parser.add_argument("--gamma", type=float, default=0.97)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--mended", action="store_true", help="ask the policy once for all environments")
    args = parser.parse_args()
    torch.manual_seed(0)

    envs = [Drift(seed) for seed in range(args.envs)]
    observations = [env.reset() for env in envs]
    model = ActorCritic()
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, fused=True)
    choose = act if args.mended else act_one_by_one
    for iteration in range(1, args.iterations + 1):
        rollout, observations = collect(envs, observations, model, args.rollout, choose)
        last = choose(model, observations)[2]
        advantage = advantages(rollout[4], rollout[3], rollout[5], last, args.gamma, 0.95)
        loss = update(model, optimizer, rollout, advantage, clip=0.2)
        if iteration % 10 == 0:
            print(f"iteration {iteration}: loss {loss.item():.3f}, reward {rollout[4].mean().item():.3f}")


if __name__ == "__main__":
    main()
