"""Aerial photos of made towns, and their maps."""

import torch

LAND = torch.tensor([[0.1, 0.5, 0.2], [0.5, 0.5, 0.5], [0.2, 0.3, 0.7], [0.7, 0.4, 0.3]])
DRAWN = torch.tensor([[0.8, 0.9, 0.8], [1.0, 1.0, 0.6], [0.6, 0.7, 1.0], [0.9, 0.9, 0.9]])


def towns(count, size, seed):
    """Photos and maps, from -1 to 1: land, straight roads, a lake and houses."""
    generator = torch.Generator().manual_seed(seed)
    y, x = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    kinds = torch.zeros(count, size, size, dtype=torch.long)
    places = torch.randint(4, size - 4, (count, 4), generator=generator)
    radius = torch.randint(size // 10, size // 4, (count, 1, 1), generator=generator)
    row, column, lake_y, lake_x = (part[:, None, None] for part in places.unbind(1))
    kinds[
        (torch.rand(count, size // 4, size // 4, generator=generator) < 0.15)
        .repeat_interleave(4, 1)
        .repeat_interleave(4, 2)
    ] = 3
    kinds[(y - lake_y) ** 2 + (x - lake_x) ** 2 < radius**2] = 2
    kinds[((y - row).abs() < 2) | ((x - column).abs() < 2)] = 1
    photos = LAND[kinds] + 0.08 * torch.randn(count, size, size, 3, generator=generator)
    return [(2 * part - 1).permute(0, 3, 1, 2).contiguous() for part in (photos, DRAWN[kinds])]


def batches(photos, maps, size):
    for chosen in torch.randperm(len(photos)).split(size):
        yield photos[chosen], maps[chosen]
