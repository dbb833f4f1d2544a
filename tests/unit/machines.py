"""Machines as trees of files, for tests of what reads /proc and /sys."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stepscope.machine.observed import Machine

CPU = "sys/devices/system/cpu"


def machine(root: Path, files: Mapping[str, str] | None = None, **more: Any) -> Machine:
    """A machine with these files below the root, a process 4711, and no environment variables but those given."""
    for path, text in (files or {}).items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text + "\n")
    return Machine(**{"root": root, "process": 4711, "environ": {}, **more})


def allowed(cores: str) -> dict[str, str]:
    """The process may run on these cores."""
    return {"proc/4711/status": f"Name:\tpython\nVmSwap:\t 2048 kB\nCpus_allowed_list:\t{cores}"}


def server(cores: str = "0-15") -> dict[str, str]:
    """Two NUMA nodes of four physical cores, two hyperthreads each; of four devices the last two are on node 1."""
    files = {
        **allowed(cores),
        f"{CPU}/online": "0-15",
        "sys/devices/system/node/node0/cpulist": "0-3,8-11",
        "sys/devices/system/node/node1/cpulist": "4-7,12-15",
    }
    for core in range(16):
        files[f"{CPU}/cpu{core}/topology/thread_siblings_list"] = f"{core % 8},{core % 8 + 8}"
    for number, node in enumerate((0, 0, 1, 1)):
        files.update(device(f"0000:{number + 1}7:00.0", node=node))
    return files


def device(address: str, *, node: int, vendor: str = "0x10de", kind: str = "0x030200") -> dict[str, str]:
    """A device on the PCI bus, by default NVIDIA's."""
    folder = f"sys/bus/pci/devices/{address}"
    return {f"{folder}/class": kind, f"{folder}/vendor": vendor, f"{folder}/numa_node": str(node)}


def control_group(version: int, **files: str) -> dict[str, str]:
    """A process in a container's control group with these files, such as cpu_max for cpu.max."""
    mounts = {
        1: "30 25 0:27 /docker/c1 /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
        "31 25 0:28 /docker/c1 /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory",
        2: "30 25 0:27 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw",
    }
    groups = {1: "4:memory:/docker/c1/job\n1:cpu,cpuacct:/docker/c1/job", 2: "0::/docker/c1/job"}
    folder = {1: "sys/fs/cgroup/{}/job", 2: "sys/fs/cgroup/docker/c1"}[version]
    texts = {"proc/4711/cgroup": groups[version], "proc/4711/mountinfo": mounts[version]}
    for name, text in files.items():
        controller, _, rest = name.partition("_")
        texts[f"{folder.format(controller)}/{controller}.{rest}"] = text
    return texts
