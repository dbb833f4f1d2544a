"""A text generator whose weights are kept as indices into a table of 16 values.

Planted: each layer turns its whole weight to floating point in each call, though there is memory for it.
Expected: costly-line
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import DynamicCache

from tests.zoo import command, language

TOKENS = 24


class TableLinear(nn.Module):
    """A linear layer whose weight is one of 16 values in each place, times a scale for each row."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach()
        scale = weight.abs().amax(1, keepdim=True)
        self.register_buffer("scale", scale)
        self.register_buffer("table", torch.linspace(-1, 1, 16))
        self.register_buffer("codes", ((weight / scale + 1) * 7.5).round().to(torch.uint8))

    def dequantised(self) -> Tensor:
        return self.table[self.codes.long()] * self.scale  # planted

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.dequantised())  # planted


def quantised(model: nn.Module) -> nn.Module:
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                setattr(module, name, TableLinear(child))
    return model


def dequantised_once(model: nn.Module) -> nn.Module:
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is TableLinear:
                weight = child.dequantised()
                linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
                linear.weight = nn.Parameter(weight)
                setattr(module, name, linear)
    return model


@torch.inference_mode()
def main() -> None:
    options = command.options(__doc__)
    model = quantised(language.llama())
    if not options.fault:
        model = dequantised_once(model)
    for number in command.rounds(options):
        tokens = torch.tensor(language.prompts(2, number=number))
        cache = DynamicCache(config=model.config)
        for _ in range(TOKENS):
            logits = model(tokens, past_key_values=cache, logits_to_keep=1).logits
            tokens = logits[:, -1].argmax(-1, keepdim=True)


if __name__ == "__main__":
    main()
