"""Fit energies and forces of molecules with a neural network for each element (Behler and Parrinello)."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

ELEMENTS = ("C", "H", "O")


class Images(Dataset):
    """Molecules as atoms' fingerprints and the fingerprints' derivatives by the coordinates, which are sparse.

    The derivatives are a matrix of 3 * atoms rows and atoms * fingerprint columns, kept as indices and values.
    """

    def __init__(self, count, fingerprint, seed):
        generator = torch.Generator().manual_seed(seed)
        truth = torch.randn(fingerprint, generator=torch.Generator().manual_seed(17))
        self.rows = []
        for _ in range(count):
            atoms = int(torch.randint(14, 22, (1,), generator=generator))
            elements = torch.randint(0, len(ELEMENTS), (atoms,), generator=generator)
            values = torch.rand(atoms, fingerprint, generator=generator) * 2 - 1
            near = torch.rand(atoms, atoms, generator=generator) < 0.5
            near |= torch.eye(atoms, dtype=torch.bool)
            primes = torch.randn(atoms, 3, atoms, fingerprint, generator=generator) * 0.1
            primes = (primes * near[:, None, :, None]).reshape(3 * atoms, -1).to_sparse()
            slope = torch.cos(values) * truth
            energy = (torch.sin(values) * truth).sum()
            forces = -torch.sparse.mm(primes, slope.reshape(-1, 1)).view(-1, 3)
            self.rows.append((elements, values, primes.indices(), primes.values(), energy, forces))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


def join_primes(primes):
    """Indices and values of all images' derivatives as blocks of one matrix, appended image by image."""
    indices, values = torch.empty(2, 0, dtype=torch.int64), torch.empty(0)
    row = column = 0
    for own_indices, own_values, atoms, fingerprint in primes:
        shift = torch.tensor([[row], [column]])
        indices = torch.cat([indices, own_indices + shift], 1)  # planted
        values = torch.cat([values, own_values])  # planted
        row, column = row + 3 * atoms, column + atoms * fingerprint
    return indices, values


def fill_primes(primes):
    """The same in tensors that have their size from the beginning."""
    entries = sum(len(values) for _, values, _, _ in primes)
    indices, values = torch.empty(2, entries, dtype=torch.int64), torch.empty(entries)
    row = column = begin = 0
    for own_indices, own_values, atoms, fingerprint in primes:
        end = begin + len(own_values)
        torch.add(own_indices, torch.tensor([[row], [column]]), out=indices[:, begin:end])
        values[begin:end] = own_values
        row, column, begin = row + 3 * atoms, column + atoms * fingerprint, end
    return indices, values


class Collate:
    def __init__(self, gather_primes):
        self.gather_primes = gather_primes

    def __call__(self, images):
        elements, fingerprints, indices, values, energies, forces = zip(*images, strict=True)
        sizes = [each.shape for each in fingerprints]
        primes = [(i, v, *size) for i, v, size in zip(indices, values, sizes, strict=True)]
        gathered = self.gather_primes(primes)
        atoms = torch.tensor([size[0] for size in sizes])
        image_of_atom = torch.repeat_interleave(torch.arange(len(images)), atoms)
        inputs = torch.cat(elements), torch.cat(fingerprints), image_of_atom, gathered
        return inputs, (torch.stack(energies), torch.cat(forces), atoms)


class AtomicNetworks(nn.Module):
    """Energy of each image, the sum of its atoms', and forces on the atoms."""

    def __init__(self, fingerprint, width=32):
        super().__init__()
        self.networks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(fingerprint, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)
            )
            for _ in ELEMENTS
        )

    def forward(self, elements, fingerprints, image_of_atom, primes):
        fingerprints.requires_grad_()
        order = elements.argsort()
        counts = torch.bincount(elements, minlength=len(ELEMENTS)).tolist()
        parts = zip(self.networks, fingerprints[order].split(counts), strict=True)
        atomic = torch.cat([network(part)[:, 0] for network, part in parts])
        energies = torch.zeros(int(image_of_atom[-1]) + 1).index_add(0, image_of_atom[order], atomic)
        (slope,) = torch.autograd.grad(energies.sum(), fingerprints, create_graph=True)
        (rows, columns), values = primes
        forces = torch.zeros(slope.shape[0] * 3).index_add(0, rows, values * slope.flatten()[columns], alpha=-1)
        return energies, forces.view(-1, 3)


def loss_of(model, inputs, targets, force_weight=0.3):
    energies, forces = model(*inputs)
    true_energies, true_forces, atoms = targets
    energy_loss = ((energies - true_energies) / atoms).square().mean()
    return energy_loss + force_weight * (forces - true_forces).square().mean()


def force_error(model, loader):
    errors = [(model(*inputs)[1] - targets[1]).detach().abs().mean() for inputs, targets in loader]
    return torch.stack(errors).mean().item()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=768)
    parser.add_argument("--fingerprint", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=48)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--mended", action="store_true", help="allocate a batch's derivatives once and fill them")
    args = parser.parse_args()
    torch.manual_seed(2)

    collate = Collate(fill_primes if args.mended else join_primes)
    train_set, test_set = Images(args.images, args.fingerprint, 0), Images(48, args.fingerprint, 1)
    loader = DataLoader(train_set, args.batch_size, shuffle=True, collate_fn=collate)
    model = AtomicNetworks(args.fingerprint)
    optimizer = torch.optim.Adam(model.parameters(), 5e-3, fused=True)
    for epoch in range(args.epochs):
        losses = []
        for inputs, targets in loader:
            loss = loss_of(model, inputs, targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        print(f"epoch {epoch} loss {torch.stack(losses).mean().item():.4f}")
    error = force_error(model, DataLoader(test_set, args.batch_size, collate_fn=collate))
    print(f"mean error of the forces {error:.4f}")


if __name__ == "__main__":
    main()
