"""Facts about this machine, each with a verdict. One function per section of the page; what cannot be read says why.

Called by `page`. Invariants: nothing is changed, nothing that a fact needs is worked out here when another room knows
it, and no failure of one fact keeps the others from being told.
"""

from __future__ import annotations

import dataclasses
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Literal

import psutil
import torch

import offload_engine
from offload_engine import kernels
from offload_engine.config import EngineConfig, ThreadsConfig, format_bytes
from offload_engine.device import open_device, visible_devices
from offload_engine.doctor.trials import kernel_bits, link_rates, update_rate
from offload_engine.errors import BuildError, OffloadEngineError
from offload_engine.host import SlabAllocator, host_limits, local_rank, missing_settings, split_threads
from offload_engine.host.budgets import HostBudget
from offload_engine.host.topology import cpu_words, read_topology

__all__ = ["Fact", "Verdict", "examine"]

Verdict = Literal["ok", "attention", "broken", "unknown"]
"""broken: training cannot work before it is mended. unknown: it could not be read, which is no fault by itself."""

SUPPORTED_TORCH = ((2, 11), (2, 14))
BYTES_PER_PARAMETER = 16
"""Of host memory, in the default layout."""
_LIBRARIES = (
    "numpy",
    "numba",
    "pybind11",
    "nvidia-ml-py",
    "safetensors",
    "transformers",
    "accelerate",
    "peft",
)
_VARIABLES = (
    "OMP_", "KMP_", "GOMP_", "MKL_", "GLIBC_", "MALLOC_", "LD_PRELOAD", "CUDA_", "NVIDIA_", "HIP_", "ROCR_", "NCCL_",
    "PYTORCH_", "TORCH_", "OFFLOAD_ENGINE_", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE", "RANK",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Fact:
    """One line of the page."""

    section: str
    name: str
    value: str
    verdict: Verdict = "ok"
    remedy: str = ""
    """What to do about it; empty where there is nothing to do."""


def examine(root: Path = Path("/"), environment: Mapping[str, str] = os.environ) -> list[Fact]:
    """Return all facts, in the order of the page; takes a few seconds.

    Args:
        root: replaces the root of the file system in tests.
    """
    sections: dict[str, Callable[[], Iterator[Fact]]] = {
        "Software": _software,
        "Device": lambda: _devices(environment),
        "Kernels": _kernels,
        "Cores": lambda: _cores(root, environment),
        "Memory": lambda: _memory(root),
        "Environment": lambda: _environment(environment),
        "Rates": lambda: _rates(root, environment),
    }
    found: list[Fact] = []
    for name, section in sections.items():
        try:
            found.extend(dataclasses.replace(fact, section=name) for fact in section())
        except Exception as error:  # a doctor that falls ill tells of it, and of all the rest
            found.append(Fact(name, "the rest of this section", _words(error), "unknown"))
    return found


def _words(error: BaseException) -> str:
    return f"cannot be read: {type(error).__name__}: {error}"


def _fact(name: str, value: str, verdict: Verdict = "ok", remedy: str = "") -> Fact:
    return Fact("", name, value, verdict, remedy)


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


# Software.


def _software() -> Iterator[Fact]:
    commit = _commit(Path(offload_engine.__file__).resolve().parents[1])
    yield _fact("offload-engine", offload_engine.__version__ + (f", commit {commit}" if commit else ""))
    yield _fact("system", f"{platform.platform()}, {' '.join(platform.libc_ver())}".rstrip(", "))
    yield _fact("Python", f"{platform.python_version()} ({platform.python_implementation()})")
    least, most = (".".join(map(str, version)) for version in SUPPORTED_TORCH)
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    inside = SUPPORTED_TORCH[0] <= version <= SUPPORTED_TORCH[1]
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    if getattr(torch.version, "hip", None):
        built = f"ROCm {torch.version.hip}"
    yield _fact(
        "torch",
        f"{torch.__version__}, built with {built}",
        "ok" if inside else "attention",
        "" if inside else f"The engine is tested with torch {least} to {most}: install one of these.",
    )
    versions = {}
    for library in _LIBRARIES:
        try:
            versions[library] = metadata.version(library)
        except metadata.PackageNotFoundError:
            continue
    yield _fact("libraries", ", ".join(f"{name} {version}" for name, version in versions.items()) or "none")


def _commit(folder: Path) -> str:
    """Return the short commit of a source tree, with "changed" where files differ; empty for an installed package."""
    if not (folder / ".git").exists() or not shutil.which("git"):
        return ""

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=20
        )
        return done.stdout.strip() if done.returncode == 0 else ""

    commit = git("rev-parse", "--short", "HEAD")
    return f"{commit}, changed" if commit and git("status", "--porcelain", "--untracked-files=no") else commit


# Device.


def _devices(environment: Mapping[str, str]) -> Iterator[Fact]:
    cards = _nvml_cards()
    if isinstance(cards, str):
        yield _fact("driver", cards, "ok" if not torch.accelerator.is_available() else "unknown")
    else:
        yield from cards
    if not torch.accelerator.is_available():
        if not isinstance(cards, str) and len(cards) > 1:
            hidden = environment.get("CUDA_VISIBLE_DEVICES")
            why = (
                f"CUDA_VISIBLE_DEVICES is {hidden!r}: unset it."
                if hidden is not None
                else "This torch was built without CUDA: install one that was (pytorch.org says which)."
                if torch.version.cuda is None
                else "Driver and torch's CUDA do not fit together: update the driver."
            )
            yield _fact("seen by torch", "none, though the driver lists some", "attention", why)
        else:
            yield _fact("seen by torch", "none: everything runs on the emulated device")
        return
    current = torch.accelerator.current_accelerator()
    module = torch.get_device_module(current)
    for index in range(torch.accelerator.device_count()):
        properties = module.get_device_properties(index)
        free, total = module.mem_get_info(index)
        used = total - free
        busy = used > total // 10
        yield _fact(
            f"{current.type if current else 'device'} {index}",
            f"{properties.name}, {format_bytes(free)} free of {format_bytes(total)}",
            "attention" if busy else "ok",
            f"{format_bytes(used)} are taken by others; the default budget is 90 % of what is free."
            if busy
            else "",
        )


def _nvml_cards() -> list[Fact] | str:
    """Return the driver and what it lists, or why not."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception as error:
        return f"no NVIDIA driver answers ({type(error).__name__}: {error})"
    try:
        found = [_fact("driver", f"NVIDIA {pynvml.nvmlSystemGetDriverVersion()}")]
        for index in range(pynvml.nvmlDeviceGetCount()):
            name = pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(index))
            found.append(_fact(f"card {index}", str(name)))
        return found
    finally:
        pynvml.nvmlShutdown()


# Kernels.


def _kernels() -> Iterator[Fact]:
    compiler = os.environ.get("CXX") or next(filter(shutil.which, ("c++", "g++", "clang++")), "")
    yield _fact("compiler", _compiler_words(compiler))
    try:
        backend = kernels.load()
    except BuildError as error:
        yield _fact("native kernels", "missing", "broken", str(error))
        return
    yield _fact("native kernels", backend.describe().removeprefix("kernels: "))
    for isa in kernels.available_isas():
        difference = kernel_bits(kernels.load("native", isa))
        yield _fact(
            f"self-check of {isa}",
            difference or "a small update in every layout has the bits of the same one in torch operations",
            "broken" if difference else "ok",
            f"Set isa to another one, and report this with the page ({isa})." if difference else "",
        )


def _compiler_words(compiler: str) -> str:
    if not compiler:
        return "none on the PATH; needed only to build the extension again"
    try:
        done = subprocess.run(
            [*shlex.split(compiler), "--version"], capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        return f"{compiler}, which does not run: {error}"
    return f"{compiler}: {(done.stdout or done.stderr).strip().partition(chr(10))[0]}"


# Cores.


def _cores(root: Path, environment: Mapping[str, str]) -> Iterator[Fact]:
    topology = read_topology(root)
    machine = os.cpu_count() or 0
    yield _fact("processor", f"{_processor(root)}, {machine} logical CPUs")
    siblings = max(len(core.cpus) for core in topology.cores)
    usable = f"{len(topology.cores)} cores, CPUs {cpu_words(topology.cpus)}"
    yield _fact("usable", usable + (f", {siblings} threads a core (SMT)" if siblings > 1 else ""))
    quota = topology.quota
    yield _fact(
        "cgroup CPU quota",
        "none" if quota is None else f"{quota:g} CPUs",
        "attention" if quota is not None and quota < len(topology.cores) else "ok",
        ""
        if quota is None or quota >= len(topology.cores)
        else "The group may use less than its cores: raise it.",
    )
    nodes = [node for node in topology.nodes if node.total_bytes or node.cpus]
    yield _fact(
        "NUMA nodes", f"{len(nodes) or 1}" + "".join(f"; {n.index}: CPUs {cpu_words(n.cpus)}" for n in nodes)
    )
    rank = local_rank(environment, lambda: visible_devices(EngineConfig()), root=root)
    yield _fact(
        "the engine's threads",
        split_threads(ThreadsConfig(), rank, root=root).sentence().removeprefix("Threads: "),
    )
    single = torch.get_num_threads() == 1 and len(topology.cores) > 1
    yield _fact(
        "torch's threads",
        f"{torch.get_num_threads()} for one operation",
        "attention" if single and not torch.accelerator.is_available() else "ok",
        "Without an accelerator torch computes with these alone: unset OMP_NUM_THREADS, or set threads.compute."
        if single
        else "",
    )


def _processor(root: Path) -> str:
    for line in (_read(root / "proc/cpuinfo") or "").splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("model name", "Model", "cpu model"):
            return value.strip()
    return platform.processor() or platform.machine()


# Memory.


def _memory(root: Path) -> Iterator[Fact]:
    limits = host_limits(root)
    room = limits.available_bytes // BYTES_PER_PARAMETER
    small = limits.available_bytes < 2**30
    yield _fact(
        "host",
        limits.words(),
        "attention" if small else "ok",
        "Less than 1 GiB is left: end other programs, or raise the group's limit." if small else "",
    )
    words = f"{room / 1e9:.2f} billion parameters" if room >= 1e8 else f"{room / 1e6:.1f} million parameters"
    yield _fact("room for", f"{words} at {BYTES_PER_PARAMETER} bytes each, the default layout's")
    yield _pinning()
    swap = psutil.swap_memory()
    busy = swap.used > swap.total // 2 > 0
    yield _fact(
        "swap",
        f"{format_bytes(swap.used)} used of {format_bytes(swap.total)}",
        "attention" if busy else "ok",
        "Slabs that are swapped out stall every step: free memory, or turn swap off." if busy else "",
    )
    strict = _read(root / "proc/sys/vm/overcommit_memory") == "2"
    yield _fact(
        "overcommit",
        "strict (2)" if strict else "allowed",
        "attention" if strict else "ok",
        "Reservations count in full: an allocation may fail though memory is free. sysctl vm.overcommit_memory=0."
        if strict
        else "",
    )
    pages = _read(root / "sys/kernel/mm/transparent_hugepage/enabled")
    off = pages is not None and "[never]" in pages
    yield _fact(
        "2 MiB pages",
        "unknown to this system" if pages is None else pages,
        "attention" if off else "ok",
        "Slabs of small pages cost time at set-up: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled."
        if off
        else "",
    )
    shared = root / "dev/shm"
    if shared.is_dir():
        space = shutil.disk_usage(shared)
        scarce = space.free < 64 * 2**20
        yield _fact(
            "/dev/shm",
            f"{format_bytes(space.free)} free of {format_bytes(space.total)}",
            "attention" if scarce else "ok",
            "DataLoader workers need it: --shm-size=8g for a container." if scarce else "",
        )


def _pinning() -> Fact:
    """Pin and unpin a slab, where there is a device to pin it for."""
    if not torch.accelerator.is_available():
        return _fact("pinned memory", "not tried: there is no accelerator to pin it for")
    device = open_device(EngineConfig(device="accelerator"), kernels.load())
    try:
        slabs = SlabAllocator(HostBudget(None, host_limits()), device.pin, device.unpin)
        try:
            slabs.allocate("a trial", 16 << 20)
            pinned = slabs.pinned_bytes
        finally:
            slabs.close()
    except OffloadEngineError as error:
        return _fact(
            "pinned memory", str(error), "attention", "Raise the limit of locked memory: ulimit -l unlimited."
        )
    finally:
        device.close()
    if pinned:
        return _fact("pinned memory", "works (16 MiB tried)")
    return _fact("pinned memory", "this device does not register host memory: copies are slower", "attention")


# Environment.


def _environment(environment: Mapping[str, str]) -> Iterator[Fact]:
    found = {name: value for name, value in sorted(environment.items()) if name.startswith(_VARIABLES)}
    for name, value in found.items():
        yield _fact(name, value)
    if not found:
        yield _fact("variables", "none that torch, OpenMP, the allocator or this engine read")
    missing = missing_settings(environment)
    if missing and sys.platform.startswith("linux") and not torch.accelerator.is_available():
        words = " ".join(f"{name}={value}" for name, value in missing.items())
        yield _fact(
            "of `train`, not set here",
            ", ".join(missing),
            "ok",
            f"The command sets them itself. A script of your own that computes on the CPU may want: {words}",
        )


# Rates.


def _rates(root: Path, environment: Mapping[str, str]) -> Iterator[Fact]:
    try:
        backend = kernels.load()
    except BuildError:
        yield _fact("CPU update", "not measured: there are no native kernels", "unknown")
        return
    split = split_threads(ThreadsConfig(), local_rank(environment, root=root), root=root)
    yield _fact(
        "CPU update",
        f"{update_rate(backend, split.update):.2f} billion parameters/s ({split.update} threads)",
    )
    if not torch.accelerator.is_available():
        yield _fact("links", "not measured: there is no accelerator")
        return
    h2d, d2h = link_rates(backend)
    slow = min(h2d, d2h) < 5
    yield _fact(
        "links",
        f"host to device {h2d:.1f} GB/s, device to host {d2h:.1f} GB/s (pinned, 64 MiB)",
        "attention" if slow else "ok",
        "PCIe 3.0 x16 gives about 12: see whether the slot has all its lanes (nvidia-smi -q -d PCIE)."
        if slow
        else "",
    )
