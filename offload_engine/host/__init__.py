"""The host beside the device: memory limits and budgets, slabs, process memory, and the split of the cores.

It imports no device: pinning comes in as callbacks.
"""

from offload_engine.host.budgets import HostBudget, HostLimits, host_limits
from offload_engine.host.environment import FAST_ENVIRONMENT, missing_settings
from offload_engine.host.process import peak_rss_bytes, rss_bytes
from offload_engine.host.slabs import SlabAllocator
from offload_engine.host.topology import ThreadSplit, split_threads, usable_cores

__all__ = [
    "FAST_ENVIRONMENT",
    "HostBudget",
    "HostLimits",
    "SlabAllocator",
    "ThreadSplit",
    "host_limits",
    "missing_settings",
    "peak_rss_bytes",
    "rss_bytes",
    "split_threads",
    "usable_cores",
]
