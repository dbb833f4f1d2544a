"""A made-up corpus with names in it."""

import random

import torch
from torch.utils.data import Dataset
from vocabulary import LABELS, label_number


def make_corpus(sentences, words, length, seed):
    rng = random.Random(seed)
    lexicon = [f"w{number:x}" for number in range(words)]
    corpus = []
    for _ in range(sentences):
        chosen = [lexicon[int(words * rng.random() ** 1.5)] for _ in range(length)]
        labels = [LABELS[int(word[1:], 16) % 7] if rng.random() < 0.9 else "O" for word in chosen]
        corpus.append((chosen, labels))
    return corpus


class NamesDataset(Dataset):
    def __init__(self, corpus, vocabulary):
        self.corpus = corpus
        self.vocabulary = vocabulary

    def __len__(self):
        return len(self.corpus)

    def __getitem__(self, index):
        words, labels = self.corpus[index]
        numbers = [self.vocabulary.number(word) for word in words]
        return torch.tensor(numbers), torch.tensor([label_number(label) for label in labels])
