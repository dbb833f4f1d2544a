"""Visits to a shop, a few events each, packed one after the other into sequences of a fixed length."""

import torch

EOD = 0


def event_stream(tokens, vocabulary, longest=7, seed=0):
    """Visits that begin as one of a few habits do, each with the end-of-document token behind it."""
    generator = torch.Generator().manual_seed(seed)
    habits = torch.randint(1, vocabulary, (64, longest), generator=generator)
    parts, total = [], 0
    while total < tokens:
        habit = habits[int(torch.randint(64, (), generator=generator))]
        length = int(torch.randint(2, longest + 1, (), generator=generator))
        parts += [habit[:length], torch.tensor([EOD])]
        total += length + 1
    return torch.cat(parts)[:tokens]


def get_batch(stream, batch_size, length, generator):
    starts = torch.randint(len(stream) - length - 1, (batch_size, 1), generator=generator)
    chosen = stream[starts + torch.arange(length + 1)]
    return chosen[:, :-1], chosen[:, 1:]


def masks_and_positions(tokens):
    """Who may attend to whom: earlier tokens of the same document; and the places within documents."""
    batch, length = tokens.shape
    mask = torch.ones(batch, 1, length, length).tril_()
    positions = torch.arange(length).repeat(batch, 1)
    for b in range(batch):  # planted
        ends = positions[b, tokens[b] == EOD].clone()  # planted
        previous = 0  # planted
        for j in range(ends.numel()):  # planted
            i = ends[j]  # planted
            mask[b, 0, (i + 1) :, : (i + 1)] = 0  # planted
            positions[b, (i + 1) :] -= i + 1 - previous  # planted
            previous = i + 1  # planted
    return mask > 0.5, positions


def masks_and_positions_of_documents(tokens):
    """The same from the documents' numbers: the mask is made of blocks on the diagonal."""
    length = tokens.shape[1]
    ends = (tokens == EOD).int()
    document = ends.cumsum(dim=1) - ends
    same = document[:, None, :, None] == document[:, None, None, :]
    places = torch.arange(length)
    begins = torch.where(ends.bool(), places + 1, 0).roll(1, dims=1)
    begins[:, 0] = 0
    return same & torch.ones(length, length, dtype=torch.bool).tril_(), places - begins.cummax(dim=1).values
