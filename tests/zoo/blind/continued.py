"""Continue the pretraining of a small Llama at a fixed batch size, with the settings of a large one."""

import argparse
import time
from dataclasses import dataclass

import torch
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM, get_cosine_schedule_with_warmup


@dataclass
class TrainingConfig:
    batch_size: int = 8
    sequence_length: int = 96
    learning_rate: float = 1e-3
    warmup_steps: int = 10
    gradient_checkpointing: bool = True
    log_steps: int = 20


class Sentences(Dataset):
    """Sequences from a Markov chain in which each token has eight that may follow it."""

    def __init__(self, count, length, vocabulary, seed):
        followers = torch.randint(0, vocabulary, (vocabulary, 8), generator=torch.Generator().manual_seed(0))
        generator = torch.Generator().manual_seed(seed)
        token = torch.randint(0, vocabulary, (count,), generator=generator)
        tokens = [token]
        for _ in range(length - 1):
            token = followers[token, torch.randint(0, 8, (count,), generator=generator)]
            tokens.append(token)
        self.tokens = torch.stack(tokens, 1)

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return self.tokens[index]


def make_model(vocabulary, config):
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=128,
            intermediate_size=344,
            num_hidden_layers=4,
            num_attention_heads=4,
            max_position_embeddings=config.sequence_length,
            use_cache=False,
            attention_dropout=0.1,
        )
    )
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})  # planted
    return model


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    losses = [model(input_ids=tokens, labels=tokens).loss for tokens in loader]
    model.train()
    return torch.stack(losses).mean().item()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, default=1200)
    parser.add_argument("--vocabulary", type=int, default=1000)
    parser.add_argument("--mended", action="store_true", help="keep the activations, for which there is room")
    args = parser.parse_args()
    config = TrainingConfig(gradient_checkpointing=not args.mended)
    torch.manual_seed(8)

    train_set = Sentences(args.sequences, config.sequence_length, args.vocabulary, seed=1)
    valid_set = Sentences(64, config.sequence_length, args.vocabulary, seed=2)
    loader = DataLoader(train_set, config.batch_size, shuffle=True)
    model = make_model(args.vocabulary, config).train()
    optimizer = torch.optim.AdamW(model.parameters(), config.learning_rate, fused=True)
    scheduler = get_cosine_schedule_with_warmup(optimizer, config.warmup_steps, len(loader))
    begin = time.time()
    for step, tokens in enumerate(loader, 1):
        loss = model(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        if step % config.log_steps == 0:
            rate = step * tokens.numel() / (time.time() - begin)
            print(f"step {step}/{len(loader)} loss {loss.item():.3f} {rate:.0f} tokens/s")
    print(f"validation loss {evaluate(model, DataLoader(valid_set, 16)):.3f}")


if __name__ == "__main__":
    main()
