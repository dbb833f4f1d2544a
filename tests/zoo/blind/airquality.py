"""Forecast the next hour at all stations of an air quality network with a recurrent network of our own."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn


def measurements(hours, stations, seed=0):
    """Hourly values: days, weeks, a common weather and noise."""
    generator = torch.Generator().manual_seed(seed)
    time = torch.arange(hours)[:, None]
    phase = torch.rand(stations, generator=generator) * 6.28
    weather = torch.randn(hours, 1, generator=generator).cumsum(dim=0)
    weather = weather / weather.abs().max()
    daily = torch.sin(time * 6.28 / 24 + phase) + 0.5 * torch.sin(time * 6.28 / 168 + phase)
    return daily + weather + 0.2 * torch.randn(hours, stations, generator=generator)


class RNN(nn.Module):
    """Input and last hidden state give the next hidden state and the output."""

    def __init__(self, input_size, hidden_size, output_size):
        super().__init__()
        self.hidden_size = hidden_size
        self.i2h = nn.Linear(input_size + hidden_size, hidden_size)
        self.h2o = nn.Linear(input_size + hidden_size, output_size)

    def forward(self, x):
        hidden = x.new_zeros(x.size(1), self.hidden_size)
        outputs = []
        for t in range(x.size(0)):
            combined = torch.cat((x[t], hidden), dim=1)  # planted
            hidden = torch.tanh(self.i2h(combined))  # planted
            outputs.append(self.h2o(combined))  # planted
        return torch.stack(outputs)


class WholeRNN(nn.Module):
    """The same, where all that does not wait for the hidden state is done for all hours at once."""

    def __init__(self, input_size, hidden_size, output_size):
        super().__init__()
        self.rnn = nn.RNN(input_size, hidden_size)
        self.h2o = nn.Linear(input_size + hidden_size, output_size)

    def forward(self, x):
        hidden, _ = self.rnn(x[:-1])
        before = F.pad(hidden, (0, 0, 0, 0, 1, 0))  # the state that each hour starts with
        return self.h2o(torch.cat((x, before), dim=2))


def windows(series, length, batch_size, generator):
    """A random batch as (hours, windows, stations)."""
    starts = torch.randint(len(series) - length - 1, (batch_size,), generator=generator)
    index = starts + torch.arange(length + 1)[:, None]
    chosen = series[index]
    return chosen[:-1], chosen[1:]


@torch.no_grad()
def validate(model, series, length):
    model.eval()
    x, y = windows(series, length, 64, torch.Generator().manual_seed(1))
    model.train()
    return F.mse_loss(model(x)[length // 2 :], y[length // 2 :]).item()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stations", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=96)
    parser.add_argument("--length", type=int, default=168, help="hours of a window")
    parser.add_argument("--batch-size", type=int, default=24)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--mended", action="store_true", help="use nn.RNN and one projection for all hours")
    args = parser.parse_args()
    torch.manual_seed(0)
    series = measurements(6000, args.stations)
    train, held_out = series[:5000], series[5000:]
    network = WholeRNN if args.mended else RNN
    model = network(args.stations, args.hidden, args.stations)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, fused=True)
    generator = torch.Generator().manual_seed(0)
    for step in range(1, args.steps + 1):
        x, y = windows(train, args.length, args.batch_size, generator)
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step}: loss {loss.item():.4f}, held out {validate(model, held_out, args.length):.4f}")


if __name__ == "__main__":
    main()
