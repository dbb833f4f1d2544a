"""Carts that are to reach a place and stay there; many at once, as tensors."""

import torch


class Carts:
    observation_size = 16
    actions = 5

    def __init__(self, count, seed=0):
        self.count = count
        self.generator = torch.Generator().manual_seed(seed)
        self.place = torch.zeros(count)
        self.speed = torch.zeros(count)
        self.goal = torch.zeros(count)
        self.left = torch.zeros(count)
        self.reset(torch.ones(count, dtype=torch.bool))

    def reset(self, which):
        fresh = torch.rand(2, self.count, generator=self.generator) * 2 - 1
        self.place = torch.where(which, fresh[0], self.place)
        self.goal = torch.where(which, fresh[1], self.goal)
        self.speed = self.speed.masked_fill(which, 0.0)
        self.left = self.left.masked_fill(which, 60.0)

    def observe(self):
        facts = torch.stack([self.place, self.speed, self.goal, self.left / 60], dim=1)
        return torch.cat([facts, facts.square(), facts.sin(), facts.cos()], dim=1)

    def step(self, actions):
        """Returns observations, rewards, and whose episode has ended."""
        self.speed = 0.9 * self.speed + 0.02 * (actions - 2)
        self.place = (self.place + self.speed).clamp(-1.5, 1.5)
        self.left = self.left - 1
        ended = self.left <= 0
        rewards = -(self.place - self.goal).abs()
        self.reset(ended)
        return self.observe(), rewards, ended.float()
