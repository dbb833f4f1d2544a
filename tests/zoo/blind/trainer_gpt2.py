"""Train a small GPT-2 with the Trainer of Transformers."""

import argparse
import tempfile

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed


class Numbers(Dataset):
    """Sequences that count up in steps of different sizes."""

    def __init__(self, count, length, vocabulary, seed):
        generator = torch.Generator().manual_seed(seed)
        start = torch.randint(vocabulary, (count, 1), generator=generator)
        stride = torch.randint(1, 9, (count, 1), generator=generator)
        self.tokens = (start + stride * torch.arange(length)) % vocabulary

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


class PrintLosses(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        kept = {name: round(value, 4) for name, value in (logs or {}).items() if name in ("loss", "eval_loss")}
        if kept:
            print(f"step {state.global_step}: {kept}")


def make_model(vocabulary, length):
    config = GPT2Config(
        vocab_size=vocabulary,
        n_positions=length,
        n_embd=96,
        n_layer=3,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
        loss_type="ForCausalLMLoss",
    )
    return GPT2LMHeadModel(config)


def count_parameters(model):
    return sum(parameter.numel() for parameter in model.parameters())


def next_numbers(model, tokens, count):
    """Continue a sequence greedily."""
    model.eval()
    with torch.no_grad():
        for _ in range(count):
            following = model(tokens).logits[:, -1].argmax(-1, keepdim=True)
            tokens = torch.cat([tokens, following], dim=1)
    return tokens[0, -count:].tolist()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--length", type=int, default=48)
    parser.add_argument("--vocabulary", type=int, default=500)
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    parser.add_argument("--mended", action="store_true", help="evaluate at the end")
    args = parser.parse_args()
    set_seed(0)

    model = make_model(args.vocabulary, args.length)
    print(f"{count_parameters(model):,} parameters")
    evaluation = {"eval_strategy": "no"} if args.mended else {"eval_strategy": "steps", "eval_steps": 2}  # planted
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=args.steps,
            per_device_train_batch_size=args.batch_size,
            per_device_eval_batch_size=args.batch_size,
            learning_rate=args.learning_rate,
            lr_scheduler_type="cosine",
            optim="adamw_torch_fused",
            logging_steps=20,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            **evaluation,
        )
        trainer = Trainer(
            model=model,
            args=arguments,
            train_dataset=Numbers(640, args.length, args.vocabulary, 0),
            eval_dataset=Numbers(32, args.length, args.vocabulary, 1),
            callbacks=[PrintLosses()],
        )
        trainer.train()  # planted
        if args.mended:
            print(f"evaluation: {trainer.evaluate()['eval_loss']:.3f}")
    print(next_numbers(model, torch.arange(5, 20)[None], 5))


if __name__ == "__main__":
    main()
