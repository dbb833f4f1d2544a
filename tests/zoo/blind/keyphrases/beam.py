"""Beam search for whole batches."""

import torch
from data import BEGIN, END, PAD


@torch.no_grad()
def beam_search(model, text, beams, length):
    """Best phrase of each text, as (batch, length)."""
    batch = len(text)
    states, hidden = model.encode(text)
    states = states.repeat_interleave(beams, 0)
    hidden = hidden.repeat_interleave(beams, 1)
    found = torch.full((batch * beams, 1), BEGIN)
    totals = torch.zeros(batch, beams)
    totals[:, 1:] = float("-inf")
    done = torch.zeros(batch * beams, dtype=torch.bool)
    first_beam = torch.arange(batch)[:, None] * beams
    for _ in range(length):
        scores, hidden = model.decode(found[:, -1:], hidden, states)
        gained = scores[:, 0].log_softmax(-1)
        gained[done] = float("-inf")
        gained[done, PAD] = 0.0
        vocabulary = gained.shape[1]
        totals, chosen = (totals[:, :, None] + gained.view(batch, beams, -1)).flatten(1).topk(beams)
        parents = (first_beam + chosen // vocabulary).flatten()
        word = (chosen % vocabulary).view(-1, 1)
        found = torch.cat([found[parents], word], 1)
        hidden = hidden[:, parents]
        done = done[parents] | (word[:, 0] == END)
    return found.view(batch, beams, -1)[:, 0, 1:]
