"""Machines from tests/fixtures/topology as the small part of /proc and /sys that the host room reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from offload_engine.host.topology import cpu_list, cpu_words

FIXTURES = Path(__file__).parent / "fixtures" / "topology"


def layout(name: str) -> dict[str, Any]:
    """Return a fixture as it is written."""
    found = json.loads((FIXTURES / f"{name}.json").read_text("utf-8"))
    assert isinstance(found, dict)
    return found


def machine(
    root: Path,
    name: str,
    *,
    allowed: str = "",
    launcher: str = "",
    mems: str = "",
    online: str = "",
    cpuset: str = "",
    cpu_max: str = "max 100000",
) -> Path:
    """Write a machine's files below `root`.

    Args:
        allowed: the process's affinity; empty: all CPUs.
        launcher: that of its parent; empty: the same.
        mems: nodes of its cpuset; empty: all.
        online: CPUs; empty: all. The others have no topology, as on Linux.
        cpuset, cpu_max: of its cgroup.
    """
    facts = layout(name)
    nodes = facts["nodes"]
    every = sorted(cpu for node in nodes for cpu in cpu_list(node["cpus"]))
    up = cpu_list(online) or frozenset(every)
    files = {
        "proc/thread-self/status": f"Cpus_allowed_list:\t{allowed or cpu_words(every)}\n"
        f"Mems_allowed_list:\t{mems or cpu_words(range(len(nodes)))}\n",
        "proc/self/status": "Name:\tpython\nPPid:\t77\n",
        "proc/77/status": f"Cpus_allowed_list:\t{launcher or allowed or cpu_words(every)}\n",
        "proc/self/cgroup": "0::/job\n",
        "proc/self/mountinfo": "29 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
        "proc/meminfo": f"MemTotal: {_kib(nodes)} kB\nMemAvailable: {_kib(nodes)} kB\n",
        "sys/fs/cgroup/job/cpu.max": cpu_max,
        "sys/devices/system/cpu/online": cpu_words(up),
        "sys/devices/system/node/online": cpu_words(range(len(nodes))),
    }
    if cpuset:
        files["sys/fs/cgroup/job/cpuset.cpus.effective"] = cpuset
    for index, node in enumerate(nodes):
        folder, kib = f"sys/devices/system/node/node{index}", node["memory_mib"] * 1024
        files[f"{folder}/cpulist"] = cpu_words(cpu_list(node["cpus"]) & up)
        files[f"{folder}/distance"] = " ".join(map(str, node["distances"]))
        files[f"{folder}/meminfo"] = (
            f"Node {index} MemTotal:       {kib} kB\nNode {index} MemFree:        {kib} kB\n"
        )
    for cpu in sorted(up):
        folder = f"sys/devices/system/cpu/cpu{cpu}/topology"
        core = siblings(facts["siblings"], cpu, len(every))
        files[f"{folder}/thread_siblings_list"] = cpu_words(core & up)
        files[f"{folder}/physical_package_id"] = str(
            min(core) * facts["packages"] * len(core) // len(every)
            if facts["siblings"] != "neighbours"
            else cpu * facts["packages"] // len(every)
        )
    for index, node in enumerate(facts.get("device_nodes", [])):
        files[f"sys/bus/pci/devices/{address(index)}/numa_node"] = f"{node}\n"
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text, encoding="utf-8")
    return root


def address(index: int) -> str:
    """Return the PCI address of a machine's device."""
    return f"0000:{0x17 + index:02x}:00.0"


def siblings(kind: str, cpu: int, count: int) -> frozenset[int]:
    """Return the CPUs of one core: a core's second CPU is numbered half of all on ("halves"), or comes next."""
    if kind == "none":
        return frozenset([cpu])
    first = cpu - cpu % 2 if kind == "neighbours" else cpu % (count // 2)
    return frozenset([first, first + 1 if kind == "neighbours" else first + count // 2])


def _kib(nodes: list[dict[str, Any]]) -> int:
    return sum(int(node["memory_mib"]) * 1024 for node in nodes)
