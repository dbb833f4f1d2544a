"""Fine-tune a causal language model of Transformers with low-rank adapters on a few short texts."""

import argparse
import logging

import torch
from adapters import add_lora, trainable
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM

log = logging.getLogger("lora")


class ShortTexts(Dataset):
    def __init__(self, count, length, vocabulary):
        generator = torch.Generator().manual_seed(0)
        start = torch.randint(vocabulary, (count, 1), generator=generator)
        self.tokens = (start + 7 * torch.arange(length)) % vocabulary

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def base_model(vocabulary):
    """Stands for a checkpoint."""
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=6,
        max_position_embeddings=128,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


@torch.no_grad()
def perplexity(model, loader):
    model.eval()
    losses = [model(**batch).loss for batch in loader]
    model.train()
    return torch.stack(losses).mean().exp().item()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=int, default=160)
    parser.add_argument("--length", type=int, default=24)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--alpha", type=float, default=16)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--mended", action="store_true", help="multiply by the two small matrices in turn")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    torch.manual_seed(0)

    vocabulary = 800
    names = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    model = add_lora(base_model(vocabulary), names, args.rank, args.alpha, merge=not args.mended)
    parameters = trainable(model)
    log.info("%d of %d parameters are trained", sum(map(torch.numel, parameters)), model.num_parameters())
    loader = DataLoader(ShortTexts(args.texts, args.length, vocabulary), args.batch_size, shuffle=True)
    optimizer = torch.optim.AdamW(parameters, lr=args.lr, fused=True)
    for step, batch in enumerate(loader):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            log.info("step %d loss %.3f", step, loss.item())
    held_out = DataLoader(ShortTexts(8, args.length, vocabulary), args.batch_size)
    log.info("perplexity %.1f", perplexity(model, held_out))


if __name__ == "__main__":
    main()
