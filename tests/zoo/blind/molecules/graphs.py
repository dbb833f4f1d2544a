"""Molecules as graphs, and batches of them."""

import random

import torch
from torch.utils.data import Dataset

ATOMS = 12


class Molecules(Dataset):
    """(kinds of atoms, bonds as pairs of atoms with a kind, solubility)."""

    def __init__(self, count, seed):
        rng = random.Random(seed)
        self.items = []
        for _ in range(count):
            atoms = rng.randint(20, 40)
            kinds = [rng.randrange(ATOMS) for _ in range(atoms)]
            bonds = [(atom, rng.randrange(max(atom - 4, 0), atom), rng.randint(1, 3)) for atom in range(1, atoms)]
            bonds += [(rng.randrange(atoms), rng.randrange(atoms), 1) for _ in range(atoms // 2)]
            self.items.append((kinds, bonds, sum(kinds) / atoms - len(bonds) / 30))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]


def collate_with_loops(samples):
    """Dense batches: kinds (molecules, atoms), bonds (molecules, atoms, atoms), mask, targets."""
    most = max(len(kinds) for kinds, _, _ in samples)
    kinds = torch.zeros(len(samples), most, dtype=torch.long)
    adjacency = torch.zeros(len(samples), most, most)
    mask = torch.zeros(len(samples), most)
    for number, (own_kinds, bonds, _) in enumerate(samples):
        for atom, kind in enumerate(own_kinds):  # planted
            kinds[number, atom] = kind  # planted
            mask[number, atom] = 1  # planted
        for first, second, order in bonds:  # planted
            adjacency[number, first, second] = order  # planted
            adjacency[number, second, first] = order  # planted
    return kinds, adjacency, mask, torch.tensor([target for _, _, target in samples])


def collate_with_indices(samples):
    """The same, each tensor filled at once."""
    most = max(len(kinds) for kinds, _, _ in samples)
    rows = [own_kinds + [0] * (most - len(own_kinds)) for own_kinds, _, _ in samples]
    kinds = torch.tensor(rows)
    lengths = torch.tensor([len(own_kinds) for own_kinds, _, _ in samples])
    mask = (torch.arange(most) < lengths[:, None]).float()
    flat = [(number, *bond) for number, (_, bonds, _) in enumerate(samples) for bond in bonds]
    number, first, second, order = torch.tensor(flat).unbind(1)
    adjacency = torch.zeros(len(samples), most, most)
    adjacency[number, first, second] = order.float()
    adjacency[number, second, first] = order.float()
    return kinds, adjacency, mask, torch.tensor([target for _, _, target in samples])
