"""Pretrain a small BERT on made-up text by filling in masked words."""

import argparse

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
from transformers import BertConfig, BertForMaskedLM, get_linear_schedule_with_warmup, set_seed

PAD, MASK, SPECIAL = 0, 1, 5


def make_corpus(lines, length, vocabulary, seed):
    """Word numbers as (lines, length); each word hints at the next."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.empty(lines, length, dtype=torch.long)
    words[:, 0] = torch.randint(SPECIAL, vocabulary, (lines,), generator=generator)
    for position in range(1, length):
        jump = torch.randint(1, 4, (lines,), generator=generator)
        words[:, position] = SPECIAL + (words[:, position - 1] - SPECIAL + 7 * jump) % (vocabulary - SPECIAL)
    return words


class MaskWords:
    """Hides a share of the words; the labels of all others are -100."""

    def __init__(self, share, seed=0):
        self.share = share
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, batch):
        words = torch.stack([line for (line,) in batch])
        hidden = torch.rand(words.shape, generator=self.generator) < self.share
        labels = words.masked_fill(~hidden, -100)
        return words.masked_fill(hidden, MASK), labels


def loss_of_all(model, words, labels):
    return model(input_ids=words, labels=labels).loss  # planted


def loss_of_masked(model, words, labels):
    """The vocabulary's scores only where a word is hidden."""
    hidden = labels != -100
    states = model.bert(input_ids=words).last_hidden_state[hidden]
    return F.cross_entropy(model.cls(states), labels[hidden])


def perplexity(model, compute_loss, loader):
    model.eval()
    with torch.no_grad():
        losses = [compute_loss(model, words, labels) for words, labels in loader]
    model.train()
    return torch.stack(losses).mean().exp().item()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lines", type=int, default=480)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--vocabulary", type=int, default=4000)
    parser.add_argument("--batch_size", type=int, default=12)
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--mask_share", type=float, default=0.15)
    parser.add_argument("--num_epochs", type=int, default=1)
    parser.add_argument("--mended", action="store_true", help="score the vocabulary for masked words only")
    args = parser.parse_args()
    set_seed(0)

    config = BertConfig(
        vocab_size=args.vocabulary,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=384,
        max_position_embeddings=args.length,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        pad_token_id=PAD,
    )
    model = BertForMaskedLM(config)
    train_set = TensorDataset(make_corpus(args.lines, args.length, args.vocabulary, 0))
    test_set = TensorDataset(make_corpus(48, args.length, args.vocabulary, 1))
    collate = MaskWords(args.mask_share)
    loader = DataLoader(train_set, args.batch_size, shuffle=True, collate_fn=collate)
    test_loader = DataLoader(test_set, args.batch_size, collate_fn=collate)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, fused=True)
    schedule = get_linear_schedule_with_warmup(optimizer, 10, args.num_epochs * len(loader))
    compute_loss = loss_of_masked if args.mended else loss_of_all

    model.train()
    for epoch in range(args.num_epochs):
        for step, (words, labels) in enumerate(loader):
            loss = compute_loss(model, words, labels)
            loss.backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            if step % 10 == 0:
                print(f"epoch {epoch} step {step} loss {loss.item():.3f}")
        print(f"epoch {epoch} perplexity {perplexity(model, compute_loss, test_loader):.1f}")


if __name__ == "__main__":
    main()
