"""Programs that do unusual things in each step, and print at their end what is left in the process."""

from __future__ import annotations

from typing import Final

_BEGIN: Final = """
import functools, gc, os, signal, sys, threading, torch
from torch.utils.data import DataLoader, Dataset
torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.1), torch.nn.ReLU(), torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), 0.1)

def left():
    functions = sys.gettrace(), sys.getprofile(), threading.gettrace()
    return (
        *(getattr(each, "__qualname__", each) for each in functions), round(sys.getswitchinterval(), 6),
        sys.getrecursionlimit(), torch._C._len_torch_function_stack(), gc.isenabled(), gc.get_threshold(),
        len(gc.callbacks), threading.active_count(),
        torch.overrides.has_torch_function.__module__, torch.nn.Module.train.__module__,
    )

def step(loss):
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return f"{loss.item():.6f}"
"""

OF_TORCH: Final = (
    _BEGIN
    + """
from torch.func import functional_call, grad, vmap
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
seen = {"functions": 0, "operators": 0, "subclass": 0}

class Functions(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        seen["functions"] += 1
        return function(*args, **(kwargs or {}))

class Operators(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        seen["operators"] += 1
        return function(*args, **(kwargs or {}))

class Tensor(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        seen["subclass"] += 1
        return super().__torch_function__(function, types, args, kwargs or {})

class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2
    @staticmethod
    def backward(ctx, gradient):
        print("backward", tuple(ctx.saved_tensors[0].shape))
        return gradient * 2

@torch.jit.script
def scripted(x, times: int):
    for _ in range(times):
        x = torch.sin(x)
    return x

def of(parameters, x):
    return functional_call(model[0], parameters, (x,)).square().mean()

kept = []
with Functions(), Operators():
    for number in range(20):
        x = torch.full((4, 8), number / 10, requires_grad=True)
        loss = checkpoint(model, x, use_reentrant=True).mean() + checkpoint(model, x, use_reentrant=False).mean()
        kept.append(x.detach().as_subclass(Tensor))
        gradients = vmap(grad(of), in_dims=(None, 0))(dict(model[0].named_parameters()), x.detach())
        print(step(loss + Twice.apply(scripted(model(x), 3)).mean() + model(kept[-1]).as_subclass(torch.Tensor).mean()))
        print(seen, f"{gradients['bias'].sum().item():.5f}")
print(left())
"""
)

OF_PYTHON: Final = (
    _BEGIN
    + """
import asyncio
gc.disable()
gc.set_threshold(500, 5, 5)
lines = []

class Late(Exception):
    pass

def late(number, frame):
    raise Late

def local(frame, event, argument):
    lines.append((event, frame.f_lineno))
    return local

def tracer(frame, event, argument):
    return local if frame.f_code.co_filename == __file__ else None

def trace_all():
    frame = sys._getframe(1)
    while frame is not None:
        frame.f_trace = local
        frame = frame.f_back
    sys.settrace(tracer)

def busy():
    total = 0
    for number in range(9000):
        total += number
    return total

def in_thread():
    one = 1
    threads.append((sys.gettrace() is tracer, one))

async def train(number):
    names = locals()
    await asyncio.sleep(0)
    result = step(model(torch.full((4, 8), number / 10)).square().mean())
    return result, sorted(names)

async def batches():
    for number in range(20):
        await asyncio.sleep(0)
        yield number

async def main():
    async for number in batches():
        print(await train(number), busy(), flush=True)
        try:
            signal.raise_signal(signal.SIGUSR1)
        except Late:
            print("late")
        if number in (3, 5, 6, 7, 12):
            child = os.fork()
            if not child:
                with torch.profiler.profile() as own:
                    torch.ones(1)
                print(left(), len(own.key_averages()) > 0, flush=True)
                os._exit(7)
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        if number == 9:
            trace_all()
        if number == 13:
            sys.settrace(None)
            print(len(lines), hash(tuple(lines)))
        thread = threading.Thread(target=in_thread)
        thread.start()
        thread.join()
    print(sys._getframe().f_trace is local, sys._getframe().f_trace_lines, threads)

threads = []
signal.signal(signal.SIGUSR1, late)
asyncio.run(main())
print(left())
sys.exit(5)
"""
)

OF_OBJECTS: Final = (
    _BEGIN
    + """
class Asked:
    def __getattr__(self, name):
        if not name.startswith("__"):
            print("asked", name)
        raise AttributeError(name)
    def __eq__(self, other):
        print("eq")
        return True
    def __hash__(self):
        print("hash")
        return 1
    def __repr__(self):
        print("repr")
        return "asked"

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = model
    def named_modules(self, *_, **__):
        print("named_modules")
    def parameters(self, *_, **__):
        print("parameters")
    def modules(self):
        print("modules")
    def __len__(self):
        print("len")
        return 0
    __eq__, __hash__, __repr__ = Asked.__eq__, Asked.__hash__, Asked.__repr__
    def forward(self, x):
        return self.inner(x)

class Transform(Asked):
    def __call__(self, value):
        return value

class Numbers(Asked, Dataset):
    def __init__(self):
        self.transform = Transform()
    def __setattr__(self, name, value):
        print("set", name)
        object.__setattr__(self, name, value)
    def __len__(self):
        print("len")
        return 80
    def __getitem__(self, index):
        return self.transform(torch.full((8,), index / 80))

class Batch(Asked):
    def __init__(self, x):
        self.x = x
    @property
    def __class__(self):
        print("class")
        return Batch

class Optimizer(Asked, torch.optim.SGD):
    pass

outer, optimizer = Model(), Optimizer(model.parameters(), 0.1)
for batch in DataLoader(Numbers(), 4, collate_fn=lambda items: Batch(torch.stack(items))):
    print(step(outer(batch.x).square().mean()))
print(left())
"""
)

THAT_END: Final = (
    _BEGIN
    + """
from concurrent.futures import ThreadPoolExecutor
def trained(number):
    return step(model(torch.full((4, 8), number / 10)).square().mean())

def calls():
    for _ in range(51_000):
        torch.ones(1)
    return torch._C._len_torch_function_stack(), sys.getprofile()

pools = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
for number in range(4):
    print(pools[0].submit(trained, number).result())
print(pools[0].submit(calls).result())
for number in range(12):
    print(pools[number // 2 % 2].submit(trained, number).result())
print([pool.submit(left).result() for pool in pools], left())
for pool in pools:
    pool.shutdown()
for thread in threading.enumerate():
    if thread is not threading.current_thread():
        thread.join()
"""
)

PROGRAMS: Final = {"torch": OF_TORCH, "python": OF_PYTHON, "objects": OF_OBJECTS, "ends": THAT_END}
