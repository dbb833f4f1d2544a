"""Route support tickets with BERT of Transformers, prepared by Accelerate."""

import argparse
import logging
import random

import torch
from accelerate import Accelerator
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch.utils.data import DataLoader, Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    PreTrainedTokenizerFast,
    get_linear_schedule_with_warmup,
)

log = logging.getLogger("tickets")
TEAMS = ["billing", "network", "hardware", "accounts"]


def make_tickets(count, seed):
    rng = random.Random(seed)
    words = [f"term{number}" for number in range(900)]
    tickets = []
    for _ in range(count):
        team = rng.randrange(len(TEAMS))
        text = rng.choices(words[team * 200 : team * 200 + 400], k=rng.randint(40, 120))
        tickets.append((" ".join(text), team))
    return tickets


def make_tokenizer():
    vocabulary = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3}
    vocabulary |= {f"term{number}": number + 4 for number in range(900)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    )


class Tickets(Dataset):
    def __init__(self, tickets, tokenizer, max_length, beforehand):
        self.tickets = tickets
        self.tokenizer = tokenizer
        self.max_length = max_length
        self.encoded = self.encode([text for text, _ in tickets]) if beforehand else None

    def encode(self, text):
        return self.tokenizer(
            text, padding="max_length", truncation=True, max_length=self.max_length, return_tensors="pt"
        )

    def __len__(self):
        return len(self.tickets)

    def __getitem__(self, index):
        text, team = self.tickets[index]
        if self.encoded is not None:
            item = {name: values[index] for name, values in self.encoded.items()}
        else:
            item = {name: values[0] for name, values in self.encode(text).items()}  # planted
        item["labels"] = torch.tensor(team)
        return item


def make_model(tokenizer):
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=96,
        num_labels=len(TEAMS),
    )
    return BertForSequenceClassification(config)


@torch.no_grad()
def evaluate(model, loader, accelerator):
    model.eval()
    right = total = 0
    for batch in loader:
        best = model(**batch).logits.argmax(-1)
        best, labels = accelerator.gather_for_metrics((best, batch["labels"]))
        right += (best == labels).sum().item()
        total += len(labels)
    model.train()
    return right / total


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--max-length", type=int, default=48)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--mended", action="store_true", help="tokenize all tickets beforehand")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    torch.manual_seed(0)

    accelerator = Accelerator(cpu=True)
    tokenizer = make_tokenizer()
    train_set = Tickets(make_tickets(768, 0), tokenizer, args.max_length, args.mended)
    test_set = Tickets(make_tickets(64, 1), tokenizer, args.max_length, args.mended)
    train_loader = DataLoader(train_set, batch_size=args.batch_size, shuffle=True)
    test_loader = DataLoader(test_set, batch_size=args.batch_size)
    model = make_model(tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    scheduler = get_linear_schedule_with_warmup(optimizer, 10, args.epochs * len(train_loader))
    model, optimizer, train_loader, test_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, test_loader, scheduler
    )
    for epoch in range(args.epochs):
        for batch in train_loader:
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        log.info("epoch %d loss %.3f accuracy %.3f", epoch, loss.item(), evaluate(model, test_loader, accelerator))


if __name__ == "__main__":
    main()
