"""Low-rank adapters around the linear layers of a model."""

import math

import torch
import torch.nn.functional as F
from torch import nn


class LoRALinear(nn.Module):
    """A frozen linear layer with a trained correction of low rank."""

    def __init__(self, base, rank, alpha, merge):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.scaling = alpha / rank
        self.merge = merge
        self.lora_a = nn.Parameter(torch.empty(rank, base.in_features))
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, rank))
        nn.init.kaiming_uniform_(self.lora_a, a=math.sqrt(5))

    def forward(self, x):
        if self.merge:
            weight = self.base.weight + self.scaling * (self.lora_b @ self.lora_a)  # planted
            return F.linear(x, weight, self.base.bias)  # planted
        return self.base(x) + self.scaling * F.linear(F.linear(x, self.lora_a), self.lora_b)


def add_lora(model, names, rank, alpha, merge):
    """Replace the linear layers with these names; everything else is frozen."""
    model.requires_grad_(False)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if name in names and isinstance(child, nn.Linear):
                setattr(module, name, LoRALinear(child, rank, alpha, merge))
    return model


def trainable(model):
    return [parameter for parameter in model.parameters() if parameter.requires_grad]
