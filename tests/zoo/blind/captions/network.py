"""A convolutional encoder and a recurrent decoder that looks at the image for each word."""

import torch
import torch.nn.functional as F
from torch import nn


class Encoder(nn.Module):
    """Images to a sequence of places."""

    def __init__(self, width):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, width // 4, 5, stride=2, padding=2),
            nn.ReLU(inplace=True),
            nn.Conv2d(width // 4, width // 2, 3, stride=2, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(width // 2, width, 3, stride=2, padding=1),
            nn.ReLU(inplace=True),
        )

    def forward(self, images):
        return self.layers(images).flatten(2).transpose(1, 2)  # planted


class Decoder(nn.Module):
    """One word more."""

    def __init__(self, vocabulary, width):
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.cell = nn.GRUCell(2 * width, width)
        self.query = nn.Linear(width, width)
        self.scores = nn.Linear(2 * width, vocabulary)

    def forward(self, word, state, places):
        weights = F.softmax(torch.bmm(places, self.query(state).unsqueeze(2)).squeeze(2), dim=1)
        seen = torch.bmm(weights.unsqueeze(1), places).squeeze(1)
        state = self.cell(torch.cat([self.words(word), seen], dim=1), state)
        return self.scores(torch.cat([state, seen], dim=1)), state


class Captioner(nn.Module):
    def __init__(self, vocabulary, width=128):
        super().__init__()
        self.width = width
        self.encoder = Encoder(width)
        self.decoder = Decoder(vocabulary, width)

    def encode(self, images):
        return self.encoder(images)

    def next_word(self, images, word, state, places=None):
        """Scores of the next word, and the decoder's state."""
        if places is None:
            places = self.encode(images)  # planted
        return self.decoder(word, state, places)
