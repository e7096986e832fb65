"""The parity tests compute with one thread."""

from tests.parity.harness import one_compute_thread

__all__ = ["one_compute_thread"]
