"""The machine that a program runs on: its devices, and what makes timings slow or noisy."""
