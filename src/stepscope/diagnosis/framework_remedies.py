"""What to change under JAX, PyTorch/XLA and Intel Gaudi, where a rule's own words are about GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import polars as pl

from stepscope.diagnosis.finding import Remedy
from stepscope.trace import Trace
from stepscope.trace.model import XLA_FORMATS

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


_NAMES: Final = {
    "torch_xla": r"SyncTensorsGraph|XLAGraphExecutor|LazyGraphExecutor|XlaMarkStep|torch_xla/|^StepMarker$",
    "jax": r"^PjitFunction|^jit\(|\bjit_\w|(?:^|/)jax/|backend_compile|^\$?(?:pjit|api|pxla|dispatch)\.py[:(]",
}
"""What only a program of that framework records; the first that is found decides."""

_LARGER_BATCH: Final = Remedy(
    "Raise the batch size step by step until operations are long or memory is full, and adapt the learning rate to it."
)
_KEEP_ON_DEVICE: Final = Remedy(
    "float(loss), print(loss), numpy.asarray() and block_until_ready() wait for the device: keep values there and "
    "read them rarely.",
    "running_loss = running_loss + loss          # stays on the device\n"
    "if step % 100 == 0:\n    print(float(running_loss) / 100)",
)
_AFTER_THE_STEP: Final = Remedy(
    "loss.item(), print(loss) and conditions on tensors end the graph and wait for the device: read values after "
    "the step, and rarely.",
    "if step % 100 == 0:\n    xm.add_step_closure(lambda loss: print(loss.item()), args=(loss,))",
)
_JAX: Final[dict[str, Remedy]] = {
    "input-bound": Remedy(
        "Load batches in worker processes, and put the next ones on the device while this one computes.",
        "loader = grain.DataLoader(data_source=source, sampler=sampler, worker_count=4)\n"
        "waiting = collections.deque()\n"
        "for batch in loader:\n"
        "    waiting.append(jax.device_put(batch))             # returns at once\n"
        "    if len(waiting) > 2:\n"
        "        state, loss = train_step(state, waiting.popleft())",
    ),
    "recompilation": Remedy(
        "See what changes from call to call, pad to few shapes, and keep what was compiled between runs.",
        'jax.config.update("jax_explain_cache_misses", True)      # tells why something is compiled\n'
        'jax.config.update("jax_compilation_cache_dir", "/path/to/cache")\n'
        "length = -(-length // 64) * 64                            # pad: few different shapes",
    ),
    "host-synchronisation": _KEEP_ON_DEVICE,
    "waiting-for-results": _KEEP_ON_DEVICE,
    "memory-headroom": _LARGER_BATCH,
    "small-batch": _LARGER_BATCH,
    "launch-bound": Remedy(
        "Let one compiled function do more: the whole step, with the optimizer, or several steps at once.",
        "train_step = jax.jit(train_step, donate_argnums=0)\n"
        "state, losses = jax.lax.scan(train_step, state, batches)   # several steps in one call",
    ),
    "python-in-step": Remedy(
        "Move what does not depend on the batch out of the step, and let a background thread do what need not be done "
        "at once.",
        "background = ThreadPoolExecutor(max_workers=1)            # once, before the loop\n"
        "background.submit(write_record, step, loss)               # in the step, instead of doing it there",
    ),
    "exposed-copy": Remedy(
        "Put the next batch on the device while this one computes, and read results a step later.",
        "following = jax.device_put(next(batches))     # returns at once\n"
        "state, loss = train_step(state, batch)\n"
        "loss.copy_to_host_async()\n"
        "batch = following",
    ),
    "device-tail": Remedy(
        "Copy while something is computed: put the next batch on the device before this step ends, and read results a "
        "step later.",
        "following = jax.device_put(next(batches))     # returns at once: right after this step was called\n"
        "result.copy_to_host_async()                   # read it after the next step was called",
    ),
    "checkpoint-in-step": Remedy(
        "Save every so many steps that a checkpoint's time does not matter, and write it in the background.",
        "manager = orbax.checkpoint.CheckpointManager(path, options=orbax.checkpoint.CheckpointManagerOptions(\n"
        "    save_interval_steps=1000, enable_async_checkpointing=True))",
    ),
    "low-occupancy": Remedy(
        "Give each call more independent work: a larger batch, or several small calls joined into one.",
        "out = jax.vmap(function)(jnp.stack(inputs))    # instead of a loop of function(input)",
    ),
    "exposed-communication": Remedy(
        "Let XLA run collectives while it computes, and exchange less or less often.",
        "XLA_FLAGS=--xla_gpu_enable_latency_hiding_scheduler=true python train.py     # on GPUs; TPUs do so by default",
    ),
    "slow-transfer": Remedy(
        "See which way the data takes, and send less of it.",
        "NCCL_DEBUG=INFO python train.py          # on GPUs: NVLink, PCIe, network card or sockets, and why",
    ),
    "trace-health": Remedy(
        "Record without Python's frames to see the step as it is.",
        "options = jax.profiler.ProfileOptions()\n"
        "options.python_tracer_level = 0\n"
        'jax.profiler.start_trace("profile", profiler_options=options)',
    ),
}
_TORCH_XLA: Final[dict[str, Remedy]] = {
    "input-bound": Remedy(
        "Load batches in worker processes, and put the next ones on the device while this one computes.",
        "loader = torch_xla.distributed.parallel_loader.MpDeviceLoader(\n"
        "    DataLoader(dataset, ..., num_workers=4), torch_xla.device())",
    ),
    "recompilation": Remedy(
        "See what makes a new graph, pad to few shapes, and keep what was compiled between runs.",
        "PT_XLA_DEBUG_LEVEL=2 python train.py                 # tells the line that made a new graph, and why\n"
        'torch_xla.runtime.initialize_cache("/path/to/cache")   # before anything is computed\n'
        "length = -(-length // 64) * 64                       # pad: few different shapes",
    ),
    "host-synchronisation": _AFTER_THE_STEP,
    "waiting-for-results": _AFTER_THE_STEP,
    "memory-headroom": _LARGER_BATCH,
    "small-batch": _LARGER_BATCH,
    "launch-bound": Remedy(
        "Trace less in each step: compile the step once, and let one graph hold all of it.",
        "@torch_xla.compile\ndef train_step(batch):\n    ...                         # forward, backward and optimizer",
    ),
    "exposed-copy": Remedy(
        "Put the next batch on the device while this one computes.",
        "loader = torch_xla.distributed.parallel_loader.MpDeviceLoader(loader, torch_xla.device())",
    ),
    "trace-health": Remedy("Record without Python's frames to see the step as it is."),
}
REMEDIES: Final[Mapping[str, Mapping[str, Remedy]]] = {"jax": _JAX, "torch_xla": _TORCH_XLA, "hpu": HPU}
"""Framework -> rule -> what to do there."""


def framework_of(trace: Trace) -> str | None:
    """ "jax" or "torch_xla" where what the host recorded is one's of these, "hpu" on Gaudi; None for all else."""
    if trace.metadata.format == "gaudi":
        return "hpu"
    if trace.metadata.format not in XLA_FORMATS:
        return None
    tables = (trace.operators, trace.frames, trace.launches, trace.annotations, trace.device_work)
    names = pl.concat([table["name"] for table in tables]).unique()
    return next((one for one, pattern in _NAMES.items() if bool(names.str.contains(pattern).any())), None)


def for_framework(framework: str | None, rule: str, remedy: Remedy) -> Remedy:
    """The remedy that this rule's finding has in a program of that framework."""
    return REMEDIES.get(framework or "", {}).get(rule, remedy)
