"""Language models, a tokenizer and requests of the inference programs, made from nothing: no file is loaded."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

PADDING = 0


def llama(*, width: int = 256, layers: int = 4, vocabulary: int = 2048, **settings: Any) -> LlamaForCausalLM:
    """A small Llama with random weights, ready to generate; it never ends an answer by itself."""
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=5 * width // 2,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=4096,
        pad_token_id=PADDING,
        bos_token_id=None,
        eos_token_id=None,
        **settings,
    )
    return LlamaForCausalLM(config).eval()


def gpt2(*, width: int = 256, layers: int = 4, vocabulary: int = 2048) -> GPT2LMHeadModel:
    """A small GPT-2 with random weights, as its constructor returns it: in the mode of training."""
    config = GPT2Config(
        vocab_size=vocabulary,
        n_embd=width,
        n_layer=layers,
        n_head=8,
        n_positions=1024,
        pad_token_id=PADDING,
        bos_token_id=None,
        eos_token_id=None,
    )
    return GPT2LMHeadModel(config)


def tokenizer(vocabulary: int = 2048) -> PreTrainedTokenizerFast:
    """A tokenizer of byte pairs whose words are made up."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    words = [f"w{number:x}" for number in range(1, vocabulary)]
    inner = Tokenizer(models.WordLevel({"<pad>": PADDING} | {word: at for at, word in enumerate(words, 1)}, "w1"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.decoder = decoders.WordPiece(prefix="##")
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", padding_side="left")


def prompts(
    count: int, length: int = 24, *, number: int = 0, longest: int = 0, shared: int = 0, vocabulary: int = 2048
) -> list[Any]:
    """Lists of tokens, the same in each run.

    Args:
        number: of the round, whose prompts are others than those of other rounds.
        count: how many.
        length: of each; with `longest`, one in four is that long instead.
        shared: tokens with which all of them begin.
    """
    beginning = [each % (vocabulary - 1) + 1 for each in range(7, 7 + 11 * shared, 11)]
    choose = random.Random(number)
    lengths = [longest if longest and number % 4 == 0 else length for number in range(count)]
    return [beginning + [choose.randrange(1, vocabulary) for _ in range(each)] for each in lengths]


def padded(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    """One batch of rows, padded on the left, and its mask."""
    length = max(map(len, rows))
    tokens = torch.tensor([[PADDING] * (length - len(row)) + row for row in rows])
    return tokens, (tokens != PADDING).long()
