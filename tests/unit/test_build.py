"""The extension's build: what a missing compiler says, the way round it, and what keeps instruction sets apart."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("setuptools")
ROOT = Path(__file__).parents[2]
CSRC = ROOT / "csrc"


def build(folder: Path, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    places = ["--build-temp", str(folder / "temp"), "--build-lib", str(folder / "lib")]
    return subprocess.run(
        [sys.executable, "setup.py", *(command or ("build_ext", *places))],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def message_of(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    assert done.stderr.count("could not be built") == 1
    return done.stderr[done.stderr.index("offload-engine:") :]


def test_without_a_compiler_one_message_says_what_to_do(tmp_path):
    message = message_of(build(tmp_path, CXX="/no/such/c++"))
    assert "Command: /no/such/c++ -std=c++17" in message and "No such file" in message
    for remedy in ("Install a C++17 compiler", "CXX", "OFFLOAD_ENGINE_BUILD=numba", 'kernels = "numba"'):
        assert remedy in message


def test_a_failing_compiler_is_quoted(tmp_path):
    broken = tmp_path / "c++"
    broken.write_text("#!/bin/sh\necho 'fatal error: the disk is full' >&2\nexit 3\n")
    broken.chmod(0o755)
    message = message_of(build(tmp_path, CXX=str(broken)))
    assert "exit status 3" in message and "fatal error: the disk is full" in message


def test_numba_installs_need_no_compiler(tmp_path):
    done = build(tmp_path, CXX="/no/such/c++", OFFLOAD_ENGINE_BUILD="numba")
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.rglob("*.so"))
    done = build(tmp_path, OFFLOAD_ENGINE_BUILD="rust")
    assert done.returncode != 0 and '"native" (the default) or "numba"' in done.stderr


def includes(path: Path) -> set[str]:
    return set(re.findall(r'#include [<"]([^>"]+)[>"]', path.read_text()))


def test_native_code_knows_neither_torch_nor_cuda():
    for path in CSRC.rglob("*.*"):
        used = includes(path)
        assert not [name for name in used if re.search("torch|ATen|c10|cuda", name)], path
        if path.stem not in ("binding", "tensors"):
            assert not [name for name in used if "pybind11" in name or "Python" in name], path


def test_instruction_sets_share_no_inline_functions():
    """One that is compiled for AVX-512 and kept by the linker for all would crash elsewhere."""
    inlined = list(CSRC.glob("*-inl.h"))
    allowed = {"kernels.h", "stddef.h", "stdint.h", "string.h", "immintrin.h", "arm_neon.h"}
    allowed |= {path.name for path in inlined}
    for path in [*CSRC.glob("isa_*.cpp"), CSRC / "kernels.h", *inlined]:
        assert includes(path) <= allowed, path
    for path in inlined:
        assert re.search(r"^namespace \{$", path.read_text(), re.MULTILINE), path


@pytest.mark.skipif(not (shutil.which("g++") and shutil.which("nm")), reason="needs g++ and nm")
def test_instruction_sets_export_one_symbol_each(tmp_path):
    target = tmp_path / "isa_scalar.o"
    subprocess.run(
        ["g++", "-std=c++17", "-O1", "-c", str(CSRC / "isa_scalar.cpp"), "-o", str(target)],
        check=True,
        timeout=120,
    )
    listed = subprocess.run(["nm", "-C", "--defined-only", "-g", str(target)], capture_output=True, text=True)
    assert [line.split()[-1] for line in listed.stdout.splitlines()] == ["offload::kScalarKernels"]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not shutil.which("g++"), reason="needs a C++ compiler")
@pytest.mark.parametrize("kind", ["address,undefined", "thread"])
def test_native_code_passes_its_own_tests_under_sanitizers(kind, tmp_path):
    done = build(tmp_path, "sanitize", f"--kind={kind}")
    if "cannot find" in done.stderr:
        pytest.skip("the compiler has no sanitizer libraries")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all checks passed" in done.stdout


def test_u53_a_compiler_that_only_fails_is_named_with_its_command(tmp_path):
    message = message_of(build(tmp_path, CXX="false"))
    assert (
        "exit status 1" in message and "Command: false -std=c++17" in message and "Output: (none)" in message
    )


WITHOUT_EXTENSION = """
import gc, sys
sys.modules["offload_engine.kernels._native"] = None
import torch
import offload_engine as oe

def wrapped(kernels):
    model = torch.nn.Linear(7, 5)
    config = oe.EngineConfig(device="emulated", kernels=kernels)
    return oe.OffloadEngine(model, torch.optim.AdamW(model.parameters()), config)

for kernels in ("auto", "native"):
    try:
        wrapped(kernels)
    except oe.BuildError as error:
        print(error)
    gc.collect()
with wrapped("numba") as engine:
    engine.backward(engine(torch.ones(2, 7)).square().mean())
    engine.step()
    print("trained", engine.steps)
left_open = wrapped("numba")
"""


def test_u53_without_the_extension_the_fallback_must_be_chosen_and_trains():
    """Import works; what is missing is said once, with the way out, and no destructor adds an error of its own."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_EXTENSION],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("the native extension is not there") == 2
    assert done.stdout.count('kernels = "numba"') + done.stdout.count("kernels = 'numba'") >= 2
    assert done.stdout.splitlines()[-1] == "trained 1"
    for trouble in ("Exception ignored", "Traceback", "Error"):
        assert trouble not in done.stderr, done.stderr


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not shutil.which("g++"), reason="needs a C++ compiler")
def test_u53_builds_where_nothing_of_cuda_can_be_found(tmp_path):
    """A toolkit that is named but not there is not looked at."""
    nowhere = str(tmp_path / "no toolkit")
    folders = [f for f in os.environ["PATH"].split(os.pathsep) if not (Path(f) / "nvcc").exists()]
    cuda = {"CUDA_HOME": nowhere, "CUDA_PATH": nowhere, "CUDACXX": nowhere, "CUDA_VISIBLE_DEVICES": ""}
    done = build(tmp_path, **cuda, PATH=os.pathsep.join(folders))
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "lib").rglob("_native*"))) == 1
    assert "cuda" not in (done.stdout + done.stderr).replace(nowhere, "").lower()
