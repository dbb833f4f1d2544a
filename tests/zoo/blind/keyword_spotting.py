"""Spot spoken keywords: log-mel spectrograms into a small convolutional network."""

import argparse
import math

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset

SAMPLE_RATE = 16000
N_FFT = 512
HOP = 256
N_MELS = 40


def hz_to_mel(hz):
    return 2595.0 * math.log10(1.0 + hz / 700.0)


def mel_to_hz(mel):
    return 700.0 * (10.0 ** (mel / 2595.0) - 1.0)


def mel_filterbank(sample_rate, n_fft, n_mels):
    """Triangular filters, (n_fft // 2 + 1, n_mels)."""
    low, high = hz_to_mel(20.0), hz_to_mel(sample_rate / 2)
    centers = [mel_to_hz(low + (high - low) * i / (n_mels + 1)) for i in range(n_mels + 2)]
    bins = n_fft // 2 + 1
    bank = torch.zeros(bins, n_mels)
    for m in range(1, n_mels + 1):
        left, center, right = centers[m - 1], centers[m], centers[m + 1]
        for k in range(bins):
            hz = k * sample_rate / n_fft
            if left < hz <= center:
                bank[k, m - 1] = (hz - left) / (center - left)
            elif center < hz < right:
                bank[k, m - 1] = (right - hz) / (right - center)
    return bank


class LogMel:
    """Waveform to log-mel spectrogram."""

    def __init__(self, keep_filterbank):
        self.window = torch.hann_window(N_FFT)
        self.bank = mel_filterbank(SAMPLE_RATE, N_FFT, N_MELS) if keep_filterbank else None

    def __call__(self, wave):
        spectrum = torch.stft(wave, N_FFT, HOP, window=self.window, return_complex=True).abs().pow(2)
        bank = self.bank
        if bank is None:
            bank = mel_filterbank(SAMPLE_RATE, N_FFT, N_MELS)  # planted
        return torch.log(spectrum.T @ bank + 1e-6)


class SpokenWords(Dataset):
    def __init__(self, count, transform, words=8):
        generator = torch.Generator().manual_seed(count)
        self.labels = torch.randint(words, (count,), generator=generator)
        self.noise = torch.randn(count, SAMPLE_RATE // 2, generator=generator) * 0.1
        self.transform = transform

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        label = self.labels[index]
        time = torch.arange(SAMPLE_RATE // 2) / SAMPLE_RATE
        wave = torch.sin(2 * math.pi * (200 + 150 * label) * time) + self.noise[index]
        return self.transform(wave), label


class SpottingNet(nn.Module):
    def __init__(self, words=8, channels=64):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv1d(N_MELS, channels, 5, padding=2),
            nn.BatchNorm1d(channels),
            nn.ReLU(),
            nn.Conv1d(channels, 2 * channels, 5, stride=2, padding=2),
            nn.BatchNorm1d(2 * channels),
            nn.ReLU(),
            nn.Conv1d(2 * channels, 4 * channels, 5, stride=2, padding=2),
            nn.ReLU(),
            nn.AdaptiveAvgPool1d(1),
            nn.Flatten(),
            nn.Linear(4 * channels, words),
        )

    def forward(self, mel):
        return self.net(mel.transpose(1, 2))


@torch.no_grad()
def test(model, loader):
    model.eval()
    hits = sum((model(mel).argmax(1) == label).sum().item() for mel, label in loader)
    model.train()
    return hits / len(loader.dataset)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--mended", action="store_true", help="compute the mel filters once")
    args = parser.parse_args()
    torch.manual_seed(1)

    transform = LogMel(keep_filterbank=args.mended)
    train_loader = DataLoader(SpokenWords(640, transform), args.batch_size, shuffle=True)
    test_loader = DataLoader(SpokenWords(32, transform), args.batch_size)
    model = SpottingNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=args.learning_rate, fused=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs * len(train_loader))
    loss_fn = nn.CrossEntropyLoss(label_smoothing=0.1)
    for epoch in range(args.epochs):
        for mel, label in train_loader:
            optimizer.zero_grad()
            loss = loss_fn(model(mel), label)
            loss.backward()
            optimizer.step()
            scheduler.step()
        print(f"epoch {epoch + 1}: last loss {loss.item():.3f}")
    print(f"accuracy {test(model, test_loader):.2%}")


if __name__ == "__main__":
    main()
