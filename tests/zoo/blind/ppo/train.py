"""Teach carts to reach their goals by proximal policy optimisation."""

import argparse
import logging

import torch
from agent import Agent, generalized_advantages, ppo_loss
from environment import Carts
from torch import nn

log = logging.getLogger("ppo")


def collect(carts, agent, observations, times):
    """Let the agent act; returns what was seen and done as (times, carts, ...), and the last observations."""
    kept = {name: [] for name in ("observations", "actions", "chances", "values", "rewards", "ended")}
    for _ in range(times):
        actions, chances, values = agent.act(observations)
        following, rewards, ended = carts.step(actions)
        for name, value in zip(kept, (observations, actions, chances, values, rewards, ended), strict=True):
            kept[name].append(value)
        observations = following
    return {name: torch.stack(values) for name, values in kept.items()}, observations


class Learner:
    def __init__(self, agent, args):
        self.agent = agent
        self.args = args
        self.optimizer = torch.optim.Adam(agent.parameters(), lr=args.lr, eps=1e-5, fused=True)

    def advantages(self, rollout, last_value):
        return generalized_advantages(  # planted
            rollout["rewards"], rollout["values"], rollout["ended"], last_value, self.args.gamma, self.args.smoothing
        )

    def targets(self, rollout, last_value):
        """Advantages and returns of the whole rollout."""
        if not self.args.mended:
            return self.advantages(rollout, last_value)  # planted
        if "returns" not in rollout:
            rollout["advantages"], rollout["returns"] = self.advantages(rollout, last_value)
        return rollout["advantages"], rollout["returns"]

    def update(self, rollout, last_value):
        """Several epochs over the rollout in minibatches; returns the mean loss."""
        args, losses = self.args, []
        observations, actions, chances = (
            rollout[name].flatten(0, 1) for name in ("observations", "actions", "chances")
        )
        for _ in range(args.epochs):
            for chosen in torch.randperm(len(actions)).split(args.minibatch):
                advantages, returns = self.targets(rollout, last_value)
                loss = ppo_loss(
                    self.agent,
                    observations[chosen],
                    actions[chosen],
                    chances[chosen],
                    advantages.view(-1)[chosen],
                    returns.view(-1)[chosen],
                    args.clip,
                    args.entropy,
                )
                self.optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(self.agent.parameters(), 0.5)
                self.optimizer.step()
                losses.append(loss.item())
        return sum(losses) / len(losses)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=2)
    parser.add_argument("--carts", type=int, default=6)
    parser.add_argument("--times", type=int, default=640)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--minibatch", type=int, default=640)
    parser.add_argument("--gamma", type=float, default=0.98)
    parser.add_argument("--smoothing", type=float, default=0.95)
    parser.add_argument("--clip", type=float, default=0.2)
    parser.add_argument("--entropy", type=float, default=0.01)
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--mended", action="store_true", help="compute the advantages once for each rollout")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.manual_seed(0)

    carts = Carts(args.carts)
    agent = Agent(carts.observation_size, carts.actions)
    learner = Learner(agent, args)
    observations = carts.observe()
    for iteration in range(args.iterations):
        rollout, observations = collect(carts, agent, observations, args.times)
        with torch.no_grad():
            last_value = agent(observations)[1]
        loss = learner.update(rollout, last_value)
        log.info("iteration %d reward %.3f loss %.3f", iteration, rollout["rewards"].mean(), loss)


if __name__ == "__main__":
    main()
