"""What to change in programs on Intel Gaudi, where a rule's own words are of GPUs; by Intel's optimization guide."""

from __future__ import annotations

from typing import Final

from stepscope.diagnosis.finding import Remedy

HPU: Final[dict[str, Remedy]] = {
    "recompilation": Remedy(
        "See what changes, pad or bucket inputs to few shapes, let the bridge do so, and keep recipes between runs.",
        "PT_HPU_METRICS_FILE=metrics.json PT_HPU_METRICS_DUMP_TRIGGERS=process_exit,mark_step python train.py\n"
        "PT_HPU_ENABLE_REFINE_DYNAMIC_SHAPES=1 python train.py            # buckets and pads by itself\n"
        "PT_HPU_RECIPE_CACHE_CONFIG=/path/to/cache,false,4096 python train.py\n"
        "length = -(-length // 64) * 64                                  # pad: few different shapes\n"
        "from stepscope.remedies import LoopConstants, mark_step\n"
        "mark_step()                                                     # around a part whose shapes change\n"
        "for value in LoopConstants(values, device=device):              # not steps[i]: each i is another graph\n"
        "    ...",
    ),
    "launch-bound": Remedy(
        "Launch recorded graphs instead of single operators, or compile the model.",
        "import habana_frameworks.torch as ht\n"
        "model = ht.hpu.wrap_in_hpu_graph(model)                         # inference\n"
        'model = torch.compile(model, backend="hpu_backend")              # training without lazy mode\n'
        "from stepscope.remedies import capture_step\n"
        "model = capture_step(model)                                     # whichever suits the mode, training too",
    ),
    "host-synchronisation": Remedy(
        "loss.item(), print(loss) and .cpu() end the graph and wait for the device: keep values there and read them "
        "rarely.",
        "running_loss += loss.detach()               # stays on the device\n"
        "if step % 100 == 0:\n    print(running_loss.item() / 100)",
    ),
    "cpu-fallback": Remedy(
        "See which operators the device cannot run, and replace them or the types of their inputs.",
        "LOG_LEVEL_PT_FALLBACK=1 ENABLE_CONSOLE=true python train.py 2> fallback.log\n"
        "stepscope diagnose TRACE --fallback-log fallback.log",
    ),
    "low-precision": Remedy(
        "Let matrix products run in bfloat16.",
        'with torch.autocast(device_type="hpu", dtype=torch.bfloat16):\n    loss = model(batch)',
    ),
    "unfused-attention": Remedy(
        "Use Gaudi's fused attention.",
        "from habana_frameworks.torch.hpex.kernels import FusedSDPA\n"
        "out = FusedSDPA.apply(query, key, value, None, 0.0, True)       # mask, dropout, causal",
    ),
    "single-tensor-optimizer": Remedy(
        "Use an optimizer that updates all parameters in one operator; its eps is 1e-6 unless it is told.",
        "from habana_frameworks.torch.hpex.optimizers import FusedAdamW\n"
        "optimizer = FusedAdamW(model.parameters(), lr=lr, eps=1e-8)",
    ),
    "gradient-clipping": Remedy(
        "Clip gradients in one operator.",
        "from habana_frameworks.torch.hpex.normalization import FusedClipNorm\n"
        "clipping = FusedClipNorm(model.parameters(), 1.0)               # once, before the loop\n"
        "clipping.clip_norm(model.parameters())",
    ),
    "exposed-copy": Remedy(
        "Copy the next batch from pinned memory while this one computes.",
        'loader = DataLoader(dataset, ..., num_workers=4, pin_memory=True)\nbatch = batch.to("hpu", non_blocking=True)',
    ),
}
