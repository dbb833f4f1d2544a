"""What a run tells of itself while it goes on: logged values, norms, throughput, and how busy the machine is.

    log.py       the user's part: `Telemetry`, `telemetry()`, `log()`
    scalars.py   a logged value becomes a number, without waiting for a device
    norms.py     norms of gradients and activations by hooks, learning rates of optimizers
    sampler.py   the thread that samples; processes.py and nvidia.py are what it asks
    writer.py    rows wait in memory and are written by a thread of its own; store.py is the file
    export/      to Weights & Biases, TensorBoard and CSV

Nothing here imports torch, numpy or polars (export/ excepted): it all runs inside the user's program.
"""
