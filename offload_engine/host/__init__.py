"""The host beside the device: memory limits and budgets, slabs, process memory, and the split of the cores.

It imports no device: pinning comes in as callbacks.
"""

from offload_engine.host.binding import Binding, bind, bound_threads
from offload_engine.host.budgets import HostBudget, HostLimits, host_limits
from offload_engine.host.environment import FAST_ENVIRONMENT, missing_settings
from offload_engine.host.process import peak_rss_bytes, rss_bytes
from offload_engine.host.slabs import SlabAllocator
from offload_engine.host.threads import LocalRank, ThreadSplit, local_rank, split_threads
from offload_engine.host.topology import usable_cores

__all__ = [
    "Binding",
    "FAST_ENVIRONMENT",
    "HostBudget",
    "HostLimits",
    "LocalRank",
    "SlabAllocator",
    "ThreadSplit",
    "bind",
    "bound_threads",
    "host_limits",
    "local_rank",
    "missing_settings",
    "peak_rss_bytes",
    "rss_bytes",
    "split_threads",
    "usable_cores",
]
