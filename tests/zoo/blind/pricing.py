"""Learn a pricer of options from simulated quotes; goes back to the last good weights where the loss is not finite."""

import argparse
import copy
import logging
import math

import torch
from torch import nn

log = logging.getLogger("pricing")


def black_scholes(spot, strike, years, volatility, rate=0.02):
    spread = volatility * years.sqrt()
    d1 = ((spot / strike).log() + (rate + volatility**2 / 2) * years) / spread
    normal = torch.distributions.Normal(0.0, 1.0)
    return spot * normal.cdf(d1) - strike * (-rate * years).exp() * normal.cdf(d1 - spread)


def simulate_quotes(count, seed):
    """Moneyness, time, volatility and 29 market factors that matter little, and the price."""
    generator = torch.Generator().manual_seed(seed)
    spot = 0.6 + 0.8 * torch.rand(count, generator=generator)
    years = 0.05 + 2 * torch.rand(count, generator=generator)
    volatility = 0.1 + 0.4 * torch.rand(count, generator=generator)
    factors = torch.randn(count, 29, generator=generator)
    price = black_scholes(spot, torch.ones(count), years, volatility) + 0.005 * factors[:, 0]
    return torch.cat([torch.stack([spot, years, volatility], dim=1), factors], dim=1), price


class Pricer(nn.Module):
    def __init__(self, inputs=32, width=1280, depth=3):
        super().__init__()
        layers = [nn.Linear(inputs, width), nn.SiLU()]
        for _ in range(depth - 1):
            layers += [nn.Linear(width, width), nn.SiLU()]
        self.net = nn.Sequential(*layers, nn.Linear(width, 1))

    def forward(self, quotes):
        return self.net(quotes).squeeze(-1)


class SafeTrainer:
    """Trains, and survives batches whose loss is not finite."""

    def __init__(self, model, learning_rate, total_steps, snapshots):
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, fused=True)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, total_steps)
        self.snapshots = snapshots
        self.good = None
        self.skipped = 0

    def snapshot(self):
        return copy.deepcopy(  # planted
            {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}  # planted
        )

    def restore(self):
        self.model.load_state_dict(self.good["model"])
        self.optimizer.load_state_dict(self.good["optimizer"])

    def prepare(self):
        if self.snapshots:
            self.good = self.snapshot()  # planted

    def step(self, quotes, prices):
        self.prepare()
        loss = nn.functional.smooth_l1_loss(self.model(quotes), prices)
        if not self.snapshots and not math.isfinite(loss.item()):
            self.skipped += 1
            return loss.item()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        if self.snapshots and not math.isfinite(loss.item()):
            self.skipped += 1
            self.restore()
        self.schedule.step()
        return loss.item()


def mean_error(model, quotes, prices):
    with torch.no_grad():
        return (model(quotes) - prices).abs().mean().item()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quotes", type=int, default=12_800)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--mended", action="store_true", help="look at the loss before the weights change")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.manual_seed(0)

    quotes, prices = simulate_quotes(args.quotes, 0)
    test = simulate_quotes(512, 1)
    trainer = SafeTrainer(Pricer(), args.lr, args.steps, snapshots=not args.mended)
    order = torch.randperm(args.quotes).split(args.batch_size)
    for step in range(args.steps):
        chosen = order[step % len(order)]
        loss = trainer.step(quotes[chosen], prices[chosen])
        if step % 20 == 0:
            log.info("step %d loss %.5f", step, loss)
    log.info("mean error %.4f, %d batches skipped", mean_error(trainer.model, *test), trainer.skipped)


if __name__ == "__main__":
    main()
