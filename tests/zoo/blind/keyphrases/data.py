"""Made-up abstracts, each with the keyphrase that it is about."""

import torch
from torch.utils.data import Dataset

PAD, BEGIN, END = 0, 1, 2


class Abstracts(Dataset):
    """Pairs of words of an abstract and its phrase, whose words come up in the abstract more than once."""

    def __init__(self, count, words, phrase, vocabulary, seed):
        generator = torch.Generator().manual_seed(seed)
        self.texts = torch.randint(3, vocabulary, (count, words), generator=generator)
        phrases = torch.randint(3, vocabulary // 4, (count, phrase), generator=generator)
        places = torch.rand(count, words, generator=generator).argsort(1)[:, : 3 * phrase]
        self.texts.scatter_(1, places, phrases.repeat(1, 3))
        begin, end = torch.full((count, 1), BEGIN), torch.full((count, 1), END)
        self.phrases = torch.cat([begin, phrases, end], 1)

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, index):
        return self.texts[index], self.phrases[index]
