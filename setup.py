"""Builds the native extension: every instruction set's file with its own flags, the rest with the common ones.

Needs a C++17 compiler (CXX, or the one Python was built with) and pybind11; no CUDA, no torch headers.
`OFFLOAD_ENGINE_BUILD=numba` installs without the extension. Metadata is in pyproject.toml.
"""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Command, Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent
CSRC = ROOT / "csrc"
CORE = ("jobs", "lane", "pages", "pool", "dispatch")  # everything that knows nothing of Python
ISA_FLAGS: dict[str, dict[str, list[str]]] = {
    "x86_64": {"isa_scalar": [], "isa_avx2": ["-mavx2", "-mf16c"], "isa_avx512": ["-mavx512f", "-mf16c"]},
    "aarch64": {"isa_scalar": [], "isa_neon": []},
}
COMMON_FLAGS = [
    "-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-pthread",
    "-ffp-contract=off", "-fno-math-errno",  # one rounding per operation; square roots without a library call
    "-Wall", "-Wextra",
]  # fmt: skip
REMEDY = (
    "Install a C++17 compiler (Debian, Ubuntu: apt-get install g++; Fedora: dnf install gcc-c++; macOS: xcode-select "
    "--install) or name one in the environment variable CXX, and install again. To go without the native kernels, "
    'install with OFFLOAD_ENGINE_BUILD=numba in the environment and set kernels = "numba" in the config.'
)


def compiler() -> list[str]:
    """Return the compiler command: CXX, else the one Python was built with, else c++."""
    return shlex.split(os.environ.get("CXX") or sysconfig.get_config_var("CXX") or "c++")


def run(command: list[str]) -> None:
    """Run one compiler command; on failure end the build with the command, its output and the remedy."""
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        )
        failure, output = done.returncode and f"exit status {done.returncode}", done.stdout
    except OSError as error:
        failure, output = str(error), ""
    if failure:
        raise SystemExit(
            f"\noffload-engine: the native extension could not be built ({failure}).\n"
            f"Command: {shlex.join(command)}\nOutput: {output.strip() or '(none)'}\n{REMEDY}\n"
        )


def compile_all(
    names: Sequence[str],
    folder: Path,
    extra: Sequence[str] = (),
    *,
    force: bool = False,
    machine: str = platform.machine(),
) -> list[str]:
    """Compile csrc/<name>.cpp and the instruction sets' files of `machine` into `folder`; return the objects."""
    machine = {"AMD64": "x86_64", "arm64": "aarch64"}.get(machine, machine)
    flags: dict[str, list[str]] = dict.fromkeys(names, []) | ISA_FLAGS.get(machine, {"isa_scalar": []})
    folder.mkdir(parents=True, exist_ok=True)
    newest = max(path.stat().st_mtime for path in [*CSRC.rglob("*"), Path(__file__)])

    def compile_one(name: str) -> str:
        target = folder / f"{Path(name).name}.o"
        if force or not target.exists() or target.stat().st_mtime < newest:
            command = [*compiler(), *COMMON_FLAGS, *extra, *flags[name]]
            run([*command, "-c", str(CSRC / f"{name}.cpp"), "-o", str(target)])
        return str(target)

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        return list(threads.map(compile_one, flags))


class BuildNative(build_ext):
    """Compiles and links with the compiler driver alone, so that flags can differ per file."""

    def build_extension(self, ext: Extension) -> None:
        import pybind11

        includes = ["-I" + pybind11.get_include(), "-I" + sysconfig.get_paths()["include"]]
        built = compile_all(
            [*CORE, "tensors", "binding"], Path(self.build_temp), includes, force=bool(self.force)
        )
        library = Path(self.get_ext_fullpath(ext.name))
        library.parent.mkdir(parents=True, exist_ok=True)
        shared = ["-bundle", "-undefined", "dynamic_lookup"] if sys.platform == "darwin" else ["-shared"]
        run([*compiler(), *shared, "-pthread", *built, "-o", str(library)])


class SelfTest(Command):
    """`python setup.py selftest [--machine=aarch64 --runner=COMMAND]`: the native code's own tests, without Python.

    For another machine CXX names the cross compiler, and the runner is an emulator.
    """

    user_options = [
        ("machine=", None, "the machine that CXX compiles for (this one)"),
        ("runner=", None, "what starts the test program (nothing)"),
    ]
    flags: Sequence[str] = ()

    def initialize_options(self) -> None:
        self.machine = platform.machine()
        self.runner = ""

    def finalize_options(self) -> None:
        pass

    @property
    def folder(self) -> Path:
        """Where it is built."""
        return ROOT / "build" / f"selftest-{self.machine}"

    def run(self) -> None:
        built = compile_all([*CORE, "tests/selftest"], self.folder, self.flags, machine=self.machine)
        run([*compiler(), *self.flags, "-pthread", *built, "-o", str(self.folder / "selftest")])
        command = [*shlex.split(self.runner), str(self.folder / "selftest")]
        raise SystemExit(subprocess.run(command).returncode)


class Sanitize(SelfTest):
    """`python setup.py sanitize [--kind=thread]`: the native code's own tests under the compiler's sanitizers."""

    user_options = [("kind=", None, "address,undefined (the default) or thread")]

    def initialize_options(self) -> None:
        super().initialize_options()
        self.kind = "address,undefined"

    @property
    def folder(self) -> Path:
        """Where it is built."""
        return ROOT / "build" / f"sanitize-{self.kind.replace(',', '-')}"

    def run(self) -> None:
        kind = f"-fsanitize={self.kind}"
        self.flags = [kind, "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-g", "-O1"]
        super().run()


if os.environ.get("OFFLOAD_ENGINE_BUILD", "native") not in ("native", "numba"):
    raise SystemExit('OFFLOAD_ENGINE_BUILD must be "native" (the default) or "numba" (no extension).')
with_extension = os.environ.get("OFFLOAD_ENGINE_BUILD", "native") == "native"
setup(
    ext_modules=[Extension("offload_engine.kernels._native", [])] if with_extension else [],
    cmdclass={"build_ext": BuildNative, "selftest": SelfTest, "sanitize": Sanitize},
)
