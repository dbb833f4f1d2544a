"""Words and labels as numbers."""


class Vocabulary:
    """The words of a corpus, the most frequent first."""

    def __init__(self, sentences, mapping):
        counts = {}
        for words in sentences:
            for word in words:
                counts[word] = counts.get(word, 0) + 1
        self.words = ["<pad>", "<unk>", *sorted(counts, key=lambda word: (-counts[word], word))]
        self.numbers = {word: number for number, word in enumerate(self.words)} if mapping else None

    def __len__(self):
        return len(self.words)

    def number(self, word):
        if self.numbers is not None:
            return self.numbers.get(word, 1)
        if word in self.words:  # planted
            return self.words.index(word)  # planted
        return 1


LABELS = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC", "B-ORG", "I-ORG"]


def label_number(label):
    return LABELS.index(label)
