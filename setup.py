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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent
CSRC = ROOT / "csrc"
SOURCES = ("binding", "tensors", "jobs", "lane", "pool", "dispatch")
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


class BuildNative(build_ext):
    """Compiles and links with the compiler driver alone, so that flags can differ per file."""

    def build_extension(self, ext: Extension) -> None:
        import pybind11

        machine = {"AMD64": "x86_64", "arm64": "aarch64"}.get(platform.machine(), platform.machine())
        files = dict.fromkeys(
            SOURCES, ["-I" + pybind11.get_include(), "-I" + sysconfig.get_paths()["include"]]
        )
        files |= ISA_FLAGS.get(machine, {"isa_scalar": []})
        objects = Path(self.build_temp)
        objects.mkdir(parents=True, exist_ok=True)
        newest = max(path.stat().st_mtime for path in [*CSRC.iterdir(), Path(__file__)])

        def compile_one(name: str) -> str:
            target = objects / f"{name}.o"
            if self.force or not target.exists() or target.stat().st_mtime < newest:
                run(
                    [
                        *compiler(),
                        *COMMON_FLAGS,
                        *files[name],
                        "-c",
                        str(CSRC / f"{name}.cpp"),
                        "-o",
                        str(target),
                    ]
                )
            return str(target)

        with ThreadPoolExecutor(os.cpu_count()) as threads:
            built = list(threads.map(compile_one, files))
        library = Path(self.get_ext_fullpath(ext.name))
        library.parent.mkdir(parents=True, exist_ok=True)
        shared = ["-bundle", "-undefined", "dynamic_lookup"] if sys.platform == "darwin" else ["-shared"]
        run([*compiler(), *shared, "-pthread", *built, "-o", str(library)])


if os.environ.get("OFFLOAD_ENGINE_BUILD", "native") not in ("native", "numba"):
    raise SystemExit('OFFLOAD_ENGINE_BUILD must be "native" (the default) or "numba" (no extension).')
with_extension = os.environ.get("OFFLOAD_ENGINE_BUILD", "native") == "native"
setup(
    ext_modules=[Extension("offload_engine.kernels._native", [])] if with_extension else [],
    cmdclass={"build_ext": BuildNative},
)
