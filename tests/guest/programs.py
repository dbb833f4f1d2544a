"""The programs: each uses another side of stepscope, and prints what it computes.

Those that name stepscope themselves print the same where it fails. A program may end by an exit code of its own.
"""

from __future__ import annotations

from typing import Final

_TRAINING: Final = """
import sys, torch
from torch.utils.data import DataLoader, Dataset
torch.manual_seed(0)
torch.set_num_threads(1)

class Numbers(Dataset):
    def __init__(self):
        self.transform = self.scaled
    def __len__(self):
        return 48
    def scaled(self, value):
        return value * 0.5
    def __getitem__(self, index):
        values = torch.linspace(0, 1 + index % 5, 16)
        tokens = torch.zeros(16, dtype=torch.int64)
        tokens[: index % 16] = index
        return self.transform(values), tokens, index % 4

model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
"""

_STEPS: Final = """
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for epoch in range(EPOCHS):
    for values, tokens, labels in DataLoader(Numbers(), 4, num_workers=WORKERS):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(values), labels)
        loss.backward()
        optimizer.step()
        model.eval().train()
        torch.save(model.state_dict(), "weights.pt")
        print(f"{loss.item():.6f}", torch.utils.data._utils.pin_memory.pin_memory([epoch]))
"""

TRAINING: Final = _TRAINING + _STEPS.replace("EPOCHS", "2").replace("WORKERS", "0") + "sys.exit(3)\n"
COMPILED: Final = (
    """
import torch
from torch._dynamo.backends.debugging import aot_eager
torch._TorchCompileInductorWrapper.__call__ = lambda self, model, inputs: aot_eager(model, inputs)
"""
    + TRAINING
)
"""Compiling it is all of torch.compile but the C++ compiler, which takes twenty seconds."""
WITH_WORKERS: Final = _TRAINING + _STEPS.replace("EPOCHS", "2").replace("WORKERS", "2")

COLLECTED: Final = (
    _TRAINING
    + "import gc\n"
    + (_STEPS.replace("EPOCHS", "2").replace("WORKERS", "0").replace("zero_grad()", "zero_grad(); gc.collect()"))
)

FORWARD: Final = (
    _TRAINING
    + """
with torch.no_grad():
    for number in range(1500):
        value = model(torch.full((16384, 16), number / 1500))
        if number % 100 == 99:
            print(f"{value.sum().item():.4f}")
"""
)

OWN_PROFILER: Final = (
    _TRAINING
    + """
optimizer = torch.optim.SGD(model.parameters(), 0.1)
def step(number):
    optimizer.zero_grad()
    loss = model(torch.full((4, 16), number / 10)).square().mean()
    loss.backward()
    optimizer.step()
    print(f"{loss.item():.6f}")
for number in range(4):
    step(number)
with torch.profiler.profile() as profiler:
    for number in range(3):
        step(number)
print(any("addmm" in event.key for event in profiler.key_averages()))
"""
)

FORKS: Final = (
    _TRAINING
    + """
import os
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for number in range(12):
    optimizer.zero_grad()
    loss = model(torch.full((4, 16), number / 10)).square().mean()
    loss.backward()
    optimizer.step()
    print(f"{loss.item():.6f}", flush=True)
    if number in (0, 5):
        child = os.fork()
        if not child:
            os._exit(7)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
)

FUSED: Final = FORKS.replace("    if number", "    optimizer.load_state_dict(optimizer.state_dict())\n    if number")

BLOCK: Final = (
    _TRAINING
    + """
import stepscope
optimizer = torch.optim.SGD(model.parameters(), 0.1)
@stepscope.annotate("forward")
def forward(number):
    return model(torch.full((4, 16), number / 10)).square().mean()
with stepscope.profile("block.json.gz", schedule=stepscope.schedule(wait=1, warmup=1, active=2, repeat=2)) as profile:
    for number in range(10):
        with stepscope.step(number=number):
            optimizer.zero_grad()
            loss = forward(number)
            loss.backward()
            optimizer.step()
        profile.step()
        print(f"{loss.item():.6f}")
"""
)

TELEMETRY: Final = (
    _TRAINING
    + """
import os, time, stepscope
optimizer = torch.optim.SGD(model.parameters(), 0.1)
with stepscope.telemetry("told", interval_s=0.05) as run:
    run.watch_optimizer(optimizer)
    watch = run.watch(model, activations=True, every=1)
    for number in range(6):
        optimizer.zero_grad()
        loss = model(torch.full((4, 16), number / 10)).square().mean()
        loss.backward()
        optimizer.step()
        run.log({"loss": loss}, step=number)
        stepscope.log({"number": number})
        run.throughput(samples=4)
        run.flush()
        print(f"{loss.item():.6f}", flush=True)
        time.sleep(0.25)
    child = os.fork()
    if not child:
        os._exit(7)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    watch.remove()
"""
)

AGENT: Final = (
    _TRAINING
    + """
import os, stepscope
agent = stepscope.start_server()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for number in range(6):
    optimizer.zero_grad()
    loss = model(torch.full((4, 16), number / 10)).square().mean()
    loss.backward()
    optimizer.step()
    print(f"{loss.item():.6f}", flush=True)
    if number == 3:
        child = os.fork()
        if not child:
            os._exit(7)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
agent.close()
stepscope.start_server()
"""
)

SCALED: Final = (
    _TRAINING
    + """
optimizer = torch.optim.SGD(model.parameters(), 0.1)
scaler = torch.amp.GradScaler("cpu")
for number in range(40):
    optimizer.zero_grad()
    loss = model(torch.full((4, 16), number / 10)).square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    print(f"{loss.item():.6f}")
"""
)

MARKED: Final = (
    _TRAINING
    + """
import stepscope
for number in range(20):
    with stepscope.step():
        value = model(torch.full((4, 16), number / 10)).sum()
    print(f"{value.item():.6f}")
"""
)

TRACKED: Final = (
    _TRAINING
    + """
from torch.utils.tensorboard import SummaryWriter
writer = SummaryWriter("board")
for number in range(5):
    value = model(torch.full((4, 16), number / 10)).sum()
    writer.add_scalar("value", value, number)
    print(f"{value.item():.6f}")
writer.close()
"""
)

FRAMEWORK: Final = (
    _TRAINING
    + """
from stepscope.integrations._recording import FrameworkRecording
recording = FrameworkRecording("the loop", "framework", None, {})
optimizer = torch.optim.SGD(model.parameters(), 0.1)
recording.begin()
for number in range(14):
    optimizer.zero_grad()
    loss = model(torch.full((4, 16), number / 10)).square().mean()
    loss.backward()
    optimizer.step()
    recording.step()
    print(f"{loss.item():.6f}")
recording.end()
"""
)

LIGHTNING: Final = """
import logging, sys, warnings
warnings.simplefilter("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
import torch, lightning.pytorch as lightning
from stepscope.integrations.lightning import StepscopeCallback, StepscopeProfiler
torch.manual_seed(0)
class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)
    def training_step(self, batch, index):
        loss = self.layer(batch).square().mean()
        print(f"{loss.item():.6f}")
        return loss
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)
data = torch.utils.data.DataLoader(torch.linspace(0, 1, 8 * 32).reshape(32, 8), batch_size=2)
quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
for options in ({"profiler": StepscopeProfiler("by_profiler")}, {"callbacks": [StepscopeCallback("by_callback")]}):
    lightning.Trainer(max_epochs=1, accelerator="cpu", **quiet, **options).fit(Model(), data)
"""

THREADED: Final = """
import threading, torch
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), 0.1)

def train():
    for _ in range(6):
        optimizer.zero_grad()
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()

thread = threading.Thread(target=train)
thread.start()
thread.join()
print("the thread has ended")
"""

OUTLIVING: Final = """
import os, time, torch
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for number in range(8):
    optimizer.zero_grad()
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    if number == 1:
        open(os.environ["SAID"], "w").write("begun")
        while not os.path.exists(os.path.join(os.path.dirname(os.environ["SAID"]), "killed")):
            time.sleep(0.05)
open(os.environ["SAID"], "w").write("ended")
"""

REMOVES_ITS_RUN: Final = TRAINING.replace(
    "sys.exit(3)",
    "sys.exit(4)",
).replace(
    "        optimizer.zero_grad()",
    "        import os, shutil; shutil.rmtree(os.environ.get('STEPSCOPE_RUN') or 'nothing', ignore_errors=True)\n"
    "        optimizer.zero_grad()",
)
