"""Tune a dialogue model on rewarded answers, and average its weights for the checkpoint that is kept."""

import argparse
import copy
import math

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel


def make_dialogues(count, length, vocabulary, seed):
    """Prompts with answers and a reward for each, higher for answers that repeat words of the prompt."""
    generator = torch.Generator().manual_seed(seed)
    prompts = torch.randint(0, vocabulary, (count, length // 2), generator=generator)
    answers = torch.randint(0, vocabulary, (count, length - length // 2), generator=generator)
    faithful = torch.rand(count, 1, generator=generator)
    repeats = torch.rand(answers.shape, generator=generator) < faithful
    answers = torch.where(repeats, prompts[:, : answers.shape[1]], answers)
    return TensorDataset(torch.cat([prompts, answers], 1), faithful[:, 0])


def answer_loss(model, ids):
    """Mean loss of each answer's words."""
    begin = ids.shape[1] // 2
    scores = model(input_ids=ids).logits[:, begin - 1 : -1]
    return F.cross_entropy(scores.transpose(1, 2), ids[:, begin:], reduction="none").mean(1)


@torch.no_grad()
def moving_average(model, model_ema, beta):
    """Move the averaged weights towards the model's."""
    for parameter, average in zip(model.parameters(), model_ema.parameters(), strict=True):
        average.copy_(torch.lerp(parameter, average, beta))


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    losses = torch.cat([answer_loss(model, ids) for ids, _ in loader])
    model.train()
    return losses.mean().item()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dialogues", type=int, default=320)
    parser.add_argument("--length", type=int, default=12)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--ema-beta", type=float, default=0.992)
    parser.add_argument("--ema-start-pct", type=float, default=0.0, help="share of the steps before the average begins")
    parser.add_argument("--mended", action="store_true", help="average over the last 5%% of the steps")
    args = parser.parse_args()
    if args.mended:
        args.ema_start_pct = 0.95
    torch.manual_seed(9)

    train_set = make_dialogues(args.dialogues, args.length, args.vocabulary, seed=0)
    valid_set = make_dialogues(64, args.length, args.vocabulary, seed=1)
    loader, valid_loader = DataLoader(train_set, args.batch_size, shuffle=True), DataLoader(valid_set, 16)
    config = GPT2Config(
        vocab_size=args.vocabulary,
        n_positions=args.length,
        n_embd=args.width,
        n_layer=args.layers,
        n_head=4,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    actor = GPT2LMHeadModel(config).train()
    actor_ema = copy.deepcopy(actor).eval().requires_grad_(False)
    optimizer = torch.optim.AdamW(actor.parameters(), args.lr, fused=True)
    ema_start = math.floor(args.ema_start_pct * len(loader))
    for step, (ids, reward) in enumerate(loader):
        loss = (reward * answer_loss(actor, ids)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == ema_start:
            actor_ema.load_state_dict(actor.state_dict())
        elif step > ema_start:
            moving_average(actor, actor_ema, args.ema_beta)  # planted
        if step % 20 == 0:
            print(f"step {step} loss {loss.item():.3f}")
    print(f"validation loss {evaluate(actor, valid_loader):.3f}, averaged {evaluate(actor_ema, valid_loader):.3f}")


if __name__ == "__main__":
    main()
