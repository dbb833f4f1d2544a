"""A recurrent encoder and a decoder that attends to it."""

import torch
from torch import nn


class KeyphraseModel(nn.Module):
    def __init__(self, vocabulary, width, hidden):
        super().__init__()
        self.words = nn.Embedding(vocabulary, width, padding_idx=0)
        self.encoder = nn.GRU(width, hidden // 2, bidirectional=True, batch_first=True)
        self.bridge = nn.Linear(hidden, hidden)
        self.decoder = nn.GRU(width, hidden, batch_first=True)
        self.attend = nn.Linear(hidden, hidden, bias=False)
        self.merge = nn.Linear(2 * hidden, width)
        self.scores = nn.Linear(width, vocabulary)

    def encode(self, text):
        """States of the words, and the decoder's first state as (1, batch, hidden)."""
        states, last = self.encoder(self.words(text))
        return states, torch.tanh(self.bridge(torch.cat([last[0], last[1]], 1)))[None]

    def decode(self, words, hidden, states):
        """Scores after each of `words`, and the decoder's last state."""
        outputs, hidden = self.decoder(self.words(words), hidden)
        weights = (self.attend(outputs) @ states.transpose(1, 2)).softmax(-1)
        merged = torch.tanh(self.merge(torch.cat([outputs, weights @ states], -1)))
        return self.scores(merged), hidden

    def forward(self, text, words):
        states, hidden = self.encode(text)
        return self.decode(words, hidden, states)[0]
