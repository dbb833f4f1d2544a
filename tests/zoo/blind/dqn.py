"""Deep Q-learning on a small made-up control task."""

import argparse
import random
from collections import deque

import numpy as np
import torch
from torch import nn

STATE, ACTIONS = 24, 6


class Balance:
    """Keep a noisy linear system near zero."""

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)
        self.dynamics = self.rng.normal(size=(STATE, STATE)).astype(np.float32) / STATE**0.5
        self.pushes = self.rng.normal(size=(ACTIONS, STATE)).astype(np.float32)
        self.reset()

    def reset(self):
        self.state = self.rng.normal(size=STATE).astype(np.float32)
        self.time = 0
        return self.state

    def step(self, action):
        noise = self.rng.normal(size=STATE).astype(np.float32) * 0.05
        self.state = np.tanh(self.dynamics @ self.state + 0.3 * self.pushes[action] + noise)
        self.time += 1
        return self.state, -float(np.square(self.state).sum()), self.time == 100


class ReplayBuffer:
    """The last transitions, as they came."""

    def __init__(self, capacity):
        self.memory = deque(maxlen=capacity)

    def __len__(self):
        return len(self.memory)

    def push(self, *transition):
        self.memory.append(transition)

    def sample(self, batch_size):
        batch = random.sample(self.memory, batch_size)  # planted
        states = torch.stack([torch.tensor(item[0]) for item in batch])  # planted
        actions = torch.stack([torch.tensor(item[1]) for item in batch])  # planted
        rewards = torch.stack([torch.tensor(item[2]) for item in batch])  # planted
        following = torch.stack([torch.tensor(item[3]) for item in batch])  # planted
        done = torch.stack([torch.tensor(float(item[4])) for item in batch])  # planted
        return states, actions, rewards, following, done


class ArrayReplayBuffer:
    """The last transitions in tensors of their own, of which a batch is one indexing each."""

    def __init__(self, capacity):
        self.capacity, self.size, self.next = capacity, 0, 0
        self.states = torch.zeros(capacity, STATE)
        self.actions = torch.zeros(capacity, dtype=torch.long)
        self.rewards = torch.zeros(capacity)
        self.following = torch.zeros(capacity, STATE)
        self.done = torch.zeros(capacity)

    def __len__(self):
        return self.size

    def push(self, state, action, reward, following, done):
        at = self.next
        self.states[at] = torch.from_numpy(state)
        self.actions[at], self.rewards[at], self.done[at] = action, reward, float(done)
        self.following[at] = torch.from_numpy(following)
        self.next = (at + 1) % self.capacity
        self.size = min(self.size + 1, self.capacity)

    def sample(self, batch_size):
        chosen = torch.randint(self.size, (batch_size,))
        return tuple(values[chosen] for values in (self.states, self.actions, self.rewards, self.following, self.done))


def q_network(width=256):
    return nn.Sequential(
        nn.Linear(STATE, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, ACTIONS)
    )


def choose(network, state, epsilon):
    if random.random() < epsilon:
        return random.randrange(ACTIONS)
    with torch.no_grad():
        return int(network(torch.from_numpy(state)).argmax())


def update(online, target, optimizer, batch, gamma):
    states, actions, rewards, following, done = batch
    values = online(states).gather(1, actions[:, None]).squeeze(1)
    with torch.no_grad():
        best = online(following).argmax(1, keepdim=True)
        wanted = rewards + gamma * (1 - done) * target(following).gather(1, best).squeeze(1)
    loss = nn.functional.smooth_l1_loss(values, wanted)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--updates", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--gamma", type=float, default=0.98)
    parser.add_argument("--frames-per-update", type=int, default=4)
    parser.add_argument("--mended", action="store_true", help="keep transitions in tensors")
    args = parser.parse_args()
    random.seed(0)
    torch.manual_seed(0)

    env = Balance(seed=0)
    memory = ArrayReplayBuffer(20000) if args.mended else ReplayBuffer(20000)
    online, target = q_network(), q_network()
    target.load_state_dict(online.state_dict())
    optimizer = torch.optim.Adam(online.parameters(), lr=5e-4, fused=True)
    state, score, updates = env.reset(), 0.0, 0
    while updates < args.updates:
        for _ in range(args.frames_per_update):
            action = choose(online, state, epsilon=max(0.05, 1 - len(memory) / 1500))
            following, reward, done = env.step(action)
            memory.push(state, action, reward, following, done)
            state, score = (env.reset() if done else following), score + reward
        if len(memory) < 2000:
            continue
        loss = update(online, target, optimizer, memory.sample(args.batch_size), args.gamma)
        updates += 1
        if updates % 20 == 0:
            target.load_state_dict(online.state_dict())
            print(f"update {updates}: loss {loss.item():.3f}, reward a frame {score / env.time if env.time else 0:.2f}")


if __name__ == "__main__":
    main()
