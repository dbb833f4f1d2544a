"""What the program's optimizers, data-parallel modules and parameters are like, found among its live objects.

Nothing is hooked into torch for it, which could have torch.compile compile anew; nothing is kept of what is found.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Sequence
from typing import Any, Final

from stepscope.capture import guard
from stepscope.program_facts import DataParallelFacts, ModelFacts, OptimizerFacts

MOST: Final = 50
"""Of one kind that are described."""
_DATA_PARALLEL: Final = "torch.nn.parallel.data_parallel", "DataParallel"
_DISTRIBUTED: Final = "torch.nn.parallel.distributed", "DistributedDataParallel"


class LiveObjects:
    """Objects of some of torch's classes that are alive, those that `gc.freeze` hid excepted."""

    def __init__(self) -> None:
        import torch

        kinds = {
            "optimizers": torch.optim.Optimizer,
            "parameters": torch.nn.Parameter,
            "modules": torch.nn.Module,
            "distributed": _loaded(*_DISTRIBUTED),
            "data_parallel": _loaded(*_DATA_PARALLEL),
        }
        everything = gc.get_objects()
        classes = {type(each) for each in everything}
        self._found: dict[str, list[Any]] = {}
        for name, kind in kinds.items():
            wanted = {each for each in classes if kind is not None and issubclass(each, kind)}
            self._found[name] = [each for each in everything if type(each) in wanted] if wanted else []

    def optimizers(self) -> tuple[OptimizerFacts, ...]:
        """Those that are not wrapped by others, once each."""
        inner = {id(vars(each).get("optimizer")) for each in self._found["optimizers"]}
        wrapping = [each for each in self._found["optimizers"] if "optimizer" in vars(each)]
        shown = [each for each in self._found["optimizers"] if each not in wrapping or not inner]
        found = []
        for each in shown[:MOST]:
            with guard.attempt():
                found.append(_optimizer(each))
        return tuple(found)

    def data_parallel(self) -> tuple[DataParallelFacts, ...]:
        """DistributedDataParallel and DataParallel modules."""
        found = []
        for each in self._found["distributed"][:MOST]:
            with guard.attempt():
                found.append(_distributed(each))
        for each in self._found["data_parallel"][:MOST]:
            with guard.attempt():
                gradient_bytes = _bytes(one for one in each.parameters() if one.requires_grad)
                found.append(
                    DataParallelFacts(kind="DataParallel", devices=len(each.device_ids), gradient_bytes=gradient_bytes)
                )
        return tuple(found)

    def model(self) -> ModelFacts | None:
        """All parameters, and what the optimizers and modules hold besides; None without any parameter."""
        parameters = self._found["parameters"]
        if not parameters:
            return None
        buffers: dict[int, Any] = {}
        for module in self._found["modules"]:
            buffers.update({id(one): one for one in vars(module).get("_buffers", {}).values() if one is not None})
        state = {
            id(value): value
            for optimizer in self._found["optimizers"]
            for values in list(getattr(optimizer, "state", {}).values())
            for value in (values.values() if isinstance(values, dict) else ())
            if hasattr(value, "element_size")
        }
        return ModelFacts(
            parameters=sum(one.numel() for one in parameters),
            parameter_bytes=_bytes(parameters),
            gradient_bytes=_bytes(one for one in parameters if one.requires_grad),
            optimizer_state_bytes=_bytes(state.values()),
            buffer_bytes=_bytes(buffers.values()),
        )


def _optimizer(optimizer: Any) -> OptimizerFacts:
    groups = optimizer.param_groups
    tensors = [tensor for group in groups for tensor in group["params"]]
    devices = [tensor.device.type for tensor in tensors]
    return OptimizerFacts(
        name=type(optimizer).__name__,
        tensors=len(tensors),
        foreach=_setting(groups, "foreach"),
        fused=_setting(groups, "fused"),
        capturable=_setting(groups, "capturable"),
        implementation=_implementation(groups[0], tensors),
        device=max(sorted(set(devices)), key=devices.count) if devices else None,
    )


def _setting(groups: Sequence[dict[str, Any]], name: str) -> bool | None:
    values = {group.get(name) for group in groups}
    value = values.pop() if len(values) == 1 else None
    return value if isinstance(value, bool) else None


def _implementation(group: dict[str, Any], tensors: list[Any]) -> str | None:
    """What the optimizer's step runs: as set, else by torch's own default; None for one that knows no such choice."""
    if "foreach" not in group and "fused" not in group:
        return None
    if group.get("fused"):
        return "fused"
    foreach = group.get("foreach")
    if foreach is None and group.get("fused") is None:
        from torch.optim.optimizer import _default_to_fused_or_foreach

        fused, foreach = _default_to_fused_or_foreach(tensors, bool(group.get("differentiable")), use_fused=False)
        if fused:
            return "fused"
    return "foreach" if foreach else "single"


def _distributed(module: Any) -> DataParallelFacts:
    trained = [one for one in module.parameters() if one.requires_grad]
    without = sum(one.grad is None for one in trained)
    bucket_bytes = getattr(module, "bucket_bytes_cap", None)
    backend = None
    with guard.attempt():
        import torch.distributed

        backend = str(torch.distributed.get_backend(module.process_group))
    ids = getattr(module, "device_ids", None)
    return DataParallelFacts(
        kind="DistributedDataParallel",
        devices=len(ids) if ids else None,
        backend=backend,
        bucket_bytes=bucket_bytes if isinstance(bucket_bytes, int) else None,
        gradient_bytes=_bytes(trained),
        find_unused_parameters=bool(getattr(module, "find_unused_parameters", False)),
        gradient_as_bucket_view=bool(getattr(module, "gradient_as_bucket_view", False)),
        static_graph=bool(getattr(module, "static_graph", False)),
        unused_parameters=without if without < len(trained) else None,  # after zero_grad nothing is known
    )


def _bytes(tensors: Iterable[Any]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _loaded(module: str, name: str) -> Any:
    return getattr(sys.modules.get(module), name, None)
