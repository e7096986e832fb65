"""The rules of the code: imports one way, devices and pinning in their rooms, sizes, docstrings, frozen names.

A rule that no reader can check at a glance is checked here. Each checker is first shown a breach.
"""

from __future__ import annotations

import ast
import dataclasses
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import offload_engine

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "offload_engine"

# Each room imports from rooms of earlier lines and from itself, never from its own line's neighbours.
ORDER = [
    {"errors"},
    {"plan"},
    {"config"},
    {"timeline", "kernels"},
    {"host", "device"},
    {"buckets"},
    {"parallel"},
    {"streaming"},
    {"optim"},
    {"policy"},
    {"checkpoint"},
    {"growth", "replicas"},
    {"engine"},
    {"__init__"},
    {"planner", "training", "bench", "doctor", "integrations"},
    {"__main__"},
]
LEVEL = {room: level for level, rooms in enumerate(ORDER) for room in rooms}
LEAVES = {"timeline", "kernels"}
SIDEWAYS = {
    ("bench", "training"),  # benchmarks run the reference loop and models of the main job
    ("training", "integrations"),  # a folder of transformers is opened as its users open it
}

MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 100

PUBLIC_NAMES = [
    "BuildError",
    "CheckpointError",
    "ConfigError",
    "DeviceMemoryError",
    "DeviceShare",
    "EngineConfig",
    "HostMemoryError",
    "KernelError",
    "LinksConfig",
    "Lion",
    "LossScaleConfig",
    "Muon",
    "NonFiniteError",
    "OffloadEngine",
    "OffloadEngineError",
    "ParallelConfig",
    "RankError",
    "SignSGD",
    "StateError",
    "StepPlan",
    "ThreadsConfig",
    "Timeline",
    "UnsupportedError",
    "parameters_on_meta",
]

CONFIG_FIELDS = {
    "EngineConfig": [
        "device",
        "device_memory",
        "host_memory",
        "precision",
        "master_layout",
        "moments_layout",
        "gradients",
        "cast_inputs",
        "bucket_bytes",
        "lookahead_bytes",
        "keep_resident",
        "max_grad_norm",
        "micro_batches",
        "update_timing",
        "clip_mode",
        "speculation_memory",
        "device_share",
        "resident_states",
        "accumulation",
        "activations",
        "activation_modules",
        "kernels",
        "isa",
        "memory_ledger",
        "timeline",
        "timeline_events",
        "threads",
        "parallel",
        "links",
        "loss_scale",
        "hostile_seed",
    ],
    "ParallelConfig": [
        "pp",
        "dp",
        "cp",
        "tp",
        "ep",
        "zero_stage",
    ],
    "ThreadsConfig": [
        "compute",
        "update",
        "copies",
        "bind",
        "cpus",
    ],
    "LinksConfig": [
        "h2d_gbps",
        "d2h_gbps",
    ],
    "LossScaleConfig": [
        "init",
        "growth_factor",
        "backoff_factor",
        "growth_interval",
        "minimum",
    ],
}


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def named(node: ast.AST) -> str:
    """Return the dotted name of an attribute chain, such as torch.cuda.Stream; empty for anything else."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def imported(tree: ast.AST, package: str = "") -> Iterator[tuple[int, str]]:
    """Yield (line, dotted name) of everything imported, in functions and under TYPE_CHECKING too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, *([base] if base else [])])
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}"


def target_room(name: str) -> str | None:
    """Return the room that an imported name belongs to, None if it is not of the package."""
    parts = name.split(".")
    if parts[0] != "offload_engine":
        return None
    return parts[1] if len(parts) > 1 and parts[1] in LEVEL else "__init__"


def import_breaches(tree: ast.AST, room: str, package: str = "offload_engine") -> list[str]:
    breaches = []
    for line, name in imported(tree, package):
        target = target_room(name)
        if target is None or target == room or (room, target) in SIDEWAYS:
            continue
        if LEVEL[target] >= LEVEL[room] or (room in LEAVES and target != "errors"):
            breaches.append(f"line {line}: {room} imports {name}")
    return breaches


def uses(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield (line, dotted name) of everything imported and of every attribute chain."""
    yield from imported(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.lineno, named(node) or f"?.{node.attr}"
        elif isinstance(node, ast.keyword) and node.arg == "pin_memory":
            yield node.value.lineno, "?.pin_memory"


STREAM_MODULES = ("torch.cuda", "torch.xpu", "torch.Event")
STREAM_NAMES = ("Stream", "ExternalStream", "current_stream", "default_stream", "set_stream", "record_stream")
PIN_NAMES = ("pin_memory", "cudaHostRegister", "cudaHostUnregister", "cudaHostAlloc", "mlock")


def stream_breaches(tree: ast.AST) -> list[str]:
    return [
        f"line {line}: {name}"
        for line, name in uses(tree)
        if f"{name}.".startswith(tuple(f"{module}." for module in STREAM_MODULES))
        or name.rpartition(".")[2] in STREAM_NAMES
    ]


def pin_breaches(tree: ast.AST) -> list[str]:
    return [f"line {line}: {name}" for line, name in uses(tree) if name.rpartition(".")[2] in PIN_NAMES]


def collective_breaches(tree: ast.AST) -> list[str]:
    return [
        f"line {line}: {name}" for line, name in uses(tree) if f"{name}.".startswith("torch.distributed.")
    ]


def long_functions(tree: ast.AST) -> list[str]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > MAX_FUNCTION_LINES:
                found.append(f"{node.name}, line {node.lineno}: {lines} lines")
    return found


def all_breaches(check: object, paths: list[Path]) -> list[str]:
    assert callable(check) and paths
    return [f"{path.relative_to(ROOT)}, {breach}" for path in paths for breach in check(parsed(path))]


# --- each checker sees a breach ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("room", "code", "breaks"),
    [
        ("device", "from offload_engine.timeline import Timeline", False),
        ("device", "from offload_engine.device.base import Device", False),
        ("device", "import offload_engine.engine", True),
        ("device", "from offload_engine import engine", True),
        ("device", "from offload_engine import OffloadEngine", True),
        ("device", "from ..streaming import order", True),
        ("device", "from .base import Device", False),
        ("device", "from offload_engine.host import HostBudget", True),
        ("host", "from offload_engine.device import Device", True),
        ("timeline", "from offload_engine.errors import ConfigError", False),
        ("timeline", "from offload_engine.config import EngineConfig", True),
        ("kernels", "def f():\n    from offload_engine import timeline", True),
        ("plan", "if TYPE_CHECKING:\n    from offload_engine.config import EngineConfig", True),
        ("bench", "from offload_engine.training import models", False),
        ("training", "from offload_engine.bench import step", True),
        ("__main__", "from offload_engine.training.loop import run_job\nimport torch.nn as nn", False),
    ],
)
def test_the_import_checker_sees_breaches(room: str, code: str, breaks: bool) -> None:
    assert bool(import_breaches(ast.parse(code), room, package=f"offload_engine.{room}")) == breaks


@pytest.mark.parametrize(
    ("check", "code"),
    [
        (stream_breaches, "stream = torch.Stream()"),
        (stream_breaches, "from torch.cuda import Stream"),
        (stream_breaches, "import torch.cuda"),
        (stream_breaches, "x: torch.cuda.Event"),
        (stream_breaches, "from torch import Stream"),
        (stream_breaches, "stream = torch.get_device_module().Stream()"),
        (pin_breaches, "x = torch.empty(3).pin_memory()"),
        (pin_breaches, "x = torch.empty(3, pin_memory=True)"),
        (pin_breaches, "torch.cuda.cudart().cudaHostRegister(1, 2, 0)"),
        (collective_breaches, "import torch.distributed as dist"),
        (collective_breaches, "from torch import distributed"),
        (collective_breaches, "torch.distributed.all_reduce(x)"),
        (long_functions, "def f():\n" + "    x = 1\n" * 100),
    ],
)
def test_the_other_checkers_see_breaches(check: object, code: str) -> None:
    assert callable(check)
    assert check(ast.parse(code))
    assert not check(ast.parse("import torch\nx = torch.nn.Linear(3, 4)\ndef f():\n    return x"))


# --- the rules -----------------------------------------------------------------------------------------------------


def test_imports_run_one_way() -> None:
    breaches = []
    for path in sources("offload_engine"):
        room = room_of(path)
        assert room in LEVEL, (
            f"{path.relative_to(ROOT)} is in no known room; add it to ORDER where it belongs"
        )
        package = ".".join(path.relative_to(ROOT).parent.parts)
        breaches += [
            f"{path.relative_to(ROOT)}, {breach}" for breach in import_breaches(parsed(path), room, package)
        ]
    assert breaches == []


def test_streams_are_made_and_named_only_by_devices() -> None:
    paths = [path for path in sources("offload_engine") if room_of(path) != "device"]
    assert all_breaches(stream_breaches, paths) == []


def test_memory_is_pinned_only_by_the_host_room_through_the_accelerator() -> None:
    allowed = PACKAGE / "device" / "accelerator.py"
    paths = [path for path in sources("offload_engine") if room_of(path) != "host" and path != allowed]
    assert all_breaches(pin_breaches, paths) == []


def test_collectives_are_used_only_by_the_parallel_room() -> None:
    paths = [path for path in sources("offload_engine") if room_of(path) != "parallel"]
    assert all_breaches(collective_breaches, paths) == []


def test_files_and_functions_stay_short() -> None:
    python = sources("offload_engine", "tests", "benchmarks") + [ROOT / "setup.py"]
    native = [path for path in (ROOT / "csrc").iterdir() if path.suffix in (".cpp", ".h")]
    lengths = {path.relative_to(ROOT): len(path.read_text("utf-8").splitlines()) for path in python + native}
    assert {str(path): lines for path, lines in lengths.items() if lines > MAX_FILE_LINES} == {}
    assert all_breaches(long_functions, python) == []


def test_every_module_says_what_it_is_for() -> None:
    paths = sources("offload_engine", "benchmarks", "tests") + [ROOT / "setup.py"]
    assert [str(path.relative_to(ROOT)) for path in paths if not ast.get_docstring(parsed(path))] == []


def test_importing_the_package_touches_no_device_and_stays_lean() -> None:
    code = (
        "import sys, offload_engine, torch\n"
        "assert not torch.cuda.is_initialized(), 'CUDA was initialised'\n"
        "heavy = {'transformers', 'numba', 'accelerate', 'gguf', 'rich'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, cwd=ROOT)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


def test_public_names_are_frozen() -> None:
    """A new public name is a promise: add it here on purpose."""
    assert sorted(offload_engine.__all__) == PUBLIC_NAMES
    assert all(hasattr(offload_engine, name) for name in PUBLIC_NAMES)


def test_config_fields_are_frozen() -> None:
    """A renamed or removed field breaks users' files: change this list on purpose."""
    for name, fields in CONFIG_FIELDS.items():
        cls = getattr(offload_engine, name)
        assert [field.name for field in dataclasses.fields(cls)] == fields


def test_every_config_field_is_documented() -> None:
    """Each field of a config class is followed by a string with its meaning, unit and off value."""
    missing = []
    for path in [PACKAGE / "config.py", PACKAGE / "training" / "config.py"]:
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ClassDef) and node.name.endswith("Config"):
                for field, after in zip(node.body, [*node.body[1:], ast.Pass()], strict=True):
                    documented = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
                    if isinstance(field, ast.AnnAssign) and not documented:
                        missing.append(
                            f"{path.relative_to(ROOT)}, line {field.lineno}: {ast.unparse(field.target)}"
                        )
    assert missing == []
