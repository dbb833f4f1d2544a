"""Deep deterministic policy gradients on a made-up task: push a cart with springs to where it should be."""

import argparse
import copy
import random
from collections import deque

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

STATE, ACTION = 32, 6


class Springs:
    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)
        self.pull = (0.2 * self.rng.normal(size=(STATE, STATE))).astype(np.float32)
        self.push = (0.5 * self.rng.normal(size=(ACTION, STATE))).astype(np.float32)

    def reset(self):
        self.time = 0
        self.state = self.rng.normal(size=STATE).astype(np.float32)
        return self.state

    def step(self, action):
        self.time += 1
        self.state = np.tanh(self.state @ self.pull + action @ self.push).astype(np.float32)
        reward = -float(np.square(self.state).mean()) - 0.01 * float(np.square(action).mean())
        return self.state, reward, self.time >= 100


class TransitionList:
    """Transitions as tuples, the oldest of which are dropped."""

    def __init__(self, capacity):
        self.transitions = deque(maxlen=capacity)

    def __len__(self):
        return len(self.transitions)

    def add(self, state, action, reward, following, done):
        self.transitions.append((state, action, reward, following, done))  # planted

    def sample(self, batch_size):
        batch = random.sample(self.transitions, batch_size)  # planted
        columns = [np.array(column, dtype=np.float32) for column in zip(*batch, strict=True)]  # planted
        return [torch.from_numpy(column) for column in columns]


class TransitionArrays:
    """The same in one array for each part, written in a ring."""

    def __init__(self, capacity):
        shapes = ((STATE,), (ACTION,), (), (STATE,), ())
        self.parts = [torch.zeros(capacity, *shape) for shape in shapes]
        self.views = [part.numpy() for part in self.parts]
        self.capacity, self.count = capacity, 0

    def __len__(self):
        return min(self.count, self.capacity)

    def add(self, *transition):
        place = self.count % self.capacity
        for view, value in zip(self.views, transition, strict=True):
            view[place] = value
        self.count += 1

    def sample(self, batch_size):
        index = torch.randint(len(self), (batch_size,))
        return [part[index] for part in self.parts]


def mlp(inputs, outputs, width=96):
    hidden = [nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*hidden, nn.Linear(width, outputs))


class Agent:
    def __init__(self, gamma=0.97, tau=0.01):
        self.gamma, self.tau = gamma, tau
        self.actor, self.critic = mlp(STATE, ACTION), mlp(STATE + ACTION, 1)
        self.targets = copy.deepcopy(nn.ModuleList([self.actor, self.critic])).requires_grad_(False)
        self.actor_optimizer = torch.optim.Adam(self.actor.parameters(), lr=3e-4, fused=True)
        self.critic_optimizer = torch.optim.Adam(self.critic.parameters(), lr=1e-3, fused=True)

    @torch.no_grad()
    def act(self, state, noise):
        action = self.actor(torch.from_numpy(state)).tanh().numpy()
        return np.clip(action + noise * np.random.standard_normal(ACTION).astype(np.float32), -1, 1)

    def value(self, critic, state, action):
        return critic(torch.cat([state, action], dim=1)).squeeze(1)

    def learn(self, batch):
        state, action, reward, following, done = batch
        actor, critic = self.targets
        with torch.no_grad():
            later = self.value(critic, following, actor(following).tanh())
            goal = reward + self.gamma * (1 - done) * later
        critic_loss = F.mse_loss(self.value(self.critic, state, action), goal)
        self.critic_optimizer.zero_grad()
        critic_loss.backward()
        self.critic_optimizer.step()

        self.critic.requires_grad_(False)
        actor_loss = -self.value(self.critic, state, self.actor(state).tanh()).mean()
        self.critic.requires_grad_(True)
        self.actor_optimizer.zero_grad()
        actor_loss.backward()
        self.actor_optimizer.step()
        with torch.no_grad():
            own = [*self.actor.parameters(), *self.critic.parameters()]
            torch._foreach_lerp_(list(self.targets.parameters()), own, self.tau)
        return critic_loss.detach()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=800, help="of the environment")
    parser.add_argument("--warmup", type=int, default=5000, help="random steps before the first update")
    parser.add_argument("--batch-size", type=int, default=3072)
    parser.add_argument("--capacity", type=int, default=100_000)
    parser.add_argument("--mended", action="store_true", help="keep the transitions in arrays")
    args = parser.parse_args()
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    environment, agent = Springs(seed=0), Agent()
    memory = (TransitionArrays if args.mended else TransitionList)(args.capacity)
    state, total, returns, losses = environment.reset(), 0.0, deque(maxlen=5), []
    for step in range(args.warmup + args.steps):
        if step < args.warmup:
            action = np.random.uniform(-1, 1, ACTION).astype(np.float32)
        else:
            action = agent.act(state, noise=0.1)
        following, reward, done = environment.step(action)
        memory.add(state, action, reward, following, float(done))
        total += reward
        state = following
        if done:
            returns.append(total)
            state, total = environment.reset(), 0.0
        if step >= args.warmup:
            losses.append(agent.learn(memory.sample(args.batch_size)))
            if len(losses) == 200:
                loss = torch.stack(losses).mean().item()
                print(f"step {step + 1}: critic loss {loss:.4f}, return {np.mean(returns):.2f}")
                losses.clear()


if __name__ == "__main__":
    main()
