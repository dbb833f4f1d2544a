"""REINFORCE with a baseline on batches of episodes of a made-up bandit chain."""

import argparse
import logging

import torch
from torch import nn
from torch.distributions import Categorical

log = logging.getLogger("reinforce")
STATES, ACTIONS = 20, 5


class Chains:
    """Many independent chains that are stepped together."""

    def __init__(self, count, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.count = count
        self.moves = torch.randn(ACTIONS, STATES, generator=generator) * 0.3
        self.goal = torch.randn(STATES, generator=generator)

    def reset(self):
        self.state = torch.randn(self.count, STATES)
        return self.state

    def step(self, actions):
        self.state = 0.95 * self.state + self.moves[actions]
        return self.state, -(self.state - self.goal).abs().mean(dim=1)


class Policy(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(STATES, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.actions = nn.Linear(width, ACTIONS)
        self.baseline = nn.Linear(width, 1)

    def forward(self, states):
        hidden = self.net(states)
        return Categorical(logits=self.actions(hidden)), self.baseline(hidden).squeeze(-1)


def returns_by_definition(rewards, gamma):
    """The discounted sum of what follows, for each time of each episode."""
    episodes = []
    for episode in rewards.T.tolist():
        values = []
        for start in range(len(episode)):
            total = 0.0
            for later in range(start, len(episode)):  # planted
                total += gamma ** (later - start) * episode[later]  # planted
            values.append(total)
        episodes.append(values)
    return torch.tensor(episodes).T


def returns_backwards(rewards, gamma):
    """The same, from the last time to the first, all episodes at once."""
    result = torch.zeros_like(rewards)
    running = torch.zeros(rewards.shape[1])
    for time in range(len(rewards) - 1, -1, -1):
        running = rewards[time] + gamma * running
        result[time] = running
    return result


def play(env, policy, length):
    """An episode of each chain: log probabilities, baselines, entropies and rewards, (length, chains)."""
    states = env.reset()
    chances, baselines, entropies, rewards = [], [], [], []
    for _ in range(length):
        distribution, baseline = policy(states)
        actions = distribution.sample()
        chances.append(distribution.log_prob(actions))
        entropies.append(distribution.entropy())
        baselines.append(baseline)
        states, reward = env.step(actions)
        rewards.append(reward)
    return torch.stack(chances), torch.stack(baselines), torch.stack(entropies), torch.stack(rewards)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=96)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--iterations", type=int, default=50)
    parser.add_argument("--gamma", type=float, default=0.95)
    parser.add_argument("--entropy", type=float, default=0.01)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--mended", action="store_true", help="sum the rewards from the end, for all episodes at once")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    torch.manual_seed(0)

    env, policy = Chains(args.episodes), Policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=args.lr, fused=True)
    discounted = returns_backwards if args.mended else returns_by_definition
    for iteration in range(1, args.iterations + 1):
        chances, baselines, entropies, rewards = play(env, policy, args.length)
        returns = discounted(rewards, args.gamma)
        advantage = returns - baselines.detach()
        policy_loss = -(chances * (advantage - advantage.mean()) / (advantage.std() + 1e-6)).mean()
        value_loss = nn.functional.smooth_l1_loss(baselines, returns)
        loss = policy_loss + 0.5 * value_loss - args.entropy * entropies.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if iteration % 10 == 0:
            log.info("iteration %d loss %.3f reward %.3f", iteration, loss.item(), rewards.mean().item())


if __name__ == "__main__":
    main()
