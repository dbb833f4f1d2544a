"""What each remedy of `stepscope run --apply` is in the user's own code, where no finding says it more precisely."""

from __future__ import annotations

from typing import Final

_CODE: Final = {
    "fuse-optimizer": "from stepscope.remedies import fuse_optimizer\n\noptimizer = fuse_optimizer(optimizer)",
    "clip-in-one-pass": "from stepscope.remedies import clip_grad_norm\n\nclip_grad_norm(model.parameters(), max_norm)",
    "zero-grad": "optimizer.zero_grad(set_to_none=True)",
    "workers": "DataLoader(dataset, ..., num_workers={value})",
    "prefetch": "DataLoader(dataset, ..., prefetch_factor={value})",
    "pin-memory": "DataLoader(dataset, ..., pin_memory=True)",
    "persistent-workers": "DataLoader(dataset, ..., persistent_workers=True)",
    "non-blocking": "batch = batch.to(device, non_blocking=True)",
    "bf16": (
        "from stepscope.remedies import mixed_precision\n\n"
        'precision = mixed_precision("bf16")  # its guard compares the first losses with full precision\n'
        "loss = precision.loss(lambda: loss_of(model(batch), target))\n"
        "precision.backward(loss)\n"
        "precision.step(optimizer)"
    ),
    "fp16": (
        "from stepscope.remedies import mixed_precision\n\n"
        'precision = mixed_precision("fp16")  # its guard compares the first losses with full precision\n'
        "loss = precision.loss(lambda: loss_of(model(batch), target))\n"
        "precision.backward(loss)\n"
        "precision.step(optimizer)"
    ),
    "tf32": 'torch.set_float32_matmul_precision("high")',
    "compile": "model = torch.compile(model, mode={quoted})",
    "channels-last": (
        "model = model.to(memory_format=torch.channels_last)\n"
        "images = images.to(device, memory_format=torch.channels_last)"
    ),
    "cudnn-benchmark": "torch.backends.cudnn.benchmark = True",
    "batched-loss": "loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())",
    "chunked-loss": (
        "from stepscope.remedies import chunked_cross_entropy\n\n"
        "loss = chunked_cross_entropy(logits.flatten(0, 1), targets.flatten())"
    ),
    "deferred-logging": (
        "from stepscope.remedies import DeferredScalars\n\n"
        "with DeferredScalars(writer) as scalars:\n"
        "    for step, batch in enumerate(loader):\n"
        "        ...\n"
        "        scalars.add(step, loss=loss)  # in place of loss.item()"
    ),
    "quiet-progress": "from stepscope.remedies import every\n\nbar = every({number})(tqdm(loader))",
    "garbage-at-steps": (
        "from stepscope.remedies import collect_garbage_at_steps\n\n"
        "with collect_garbage_at_steps() as garbage:\n"
        "    for batch in loader:\n"
        "        ...\n"
        "        garbage.step()"
    ),
    "threads": "torch.set_num_threads({value})",
    "allocator": "stepscope run --allocator {value} train.py",
    "no-debug": "torch.autograd.set_detect_anomaly(False)",
    "bucket-mb": "DistributedDataParallel(model, bucket_cap_mb={value})",
    "gradient-view": "DistributedDataParallel(model, gradient_as_bucket_view=True)",
    "static-graph": "DistributedDataParallel(model, static_graph=True)",
    "no-find-unused": "DistributedDataParallel(model, find_unused_parameters=False)",
}


def code_of(name: str, value: str) -> str:
    """The remedy of an `--apply` word as code; "" for a word that is not known here."""
    return _CODE.get(name, "").format(value=value, quoted=f'"{value or "default"}"', number=value or 50)
