"""Common to all tests: a fixed seed, torch's settings put back after each test, and GPU tests skipped with a reason."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

# Before torch is loaded: idle OpenMP threads must not spin on cores that lanes and other processes need.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
import torch

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As a shell starts what runs in the background: Ctrl-C would do nothing here, nor in the processes of tests.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items and not torch.accelerator.is_available():
        reason = pytest.mark.skip(reason="torch sees no accelerator on this machine")
        for item in gpu_items:
            item.add_marker(reason)


@pytest.fixture(autouse=True)
def _fixed_torch_settings() -> Iterator[None]:
    """Seed each test alike, and put back what a test may have changed for the whole process."""
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)
    torch.set_default_dtype(dtype)
    assert torch._C._is_torch_function_enabled(), "torch function modes were left off: readers would not wait"
