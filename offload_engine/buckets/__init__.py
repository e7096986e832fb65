"""Buckets: the registry of parameters, their layout in flat buckets, and buckets with memory."""

from offload_engine.buckets.bucket import Bucket, Residency, allocate_buckets, state_bytes
from offload_engine.buckets.layout import (
    BucketLayout,
    Shard,
    check_budget,
    default_bucket_bytes,
    need_beside,
    plan_layout,
)
from offload_engine.buckets.registry import ParameterEntry, Registry, Unit, discover, is_compiled
from offload_engine.buckets.states import LAYOUT_KEYS, StateLayout, assign_states

__all__ = [
    "LAYOUT_KEYS",
    "Bucket",
    "BucketLayout",
    "ParameterEntry",
    "Registry",
    "Residency",
    "Shard",
    "StateLayout",
    "Unit",
    "allocate_buckets",
    "assign_states",
    "check_budget",
    "default_bucket_bytes",
    "discover",
    "is_compiled",
    "need_beside",
    "plan_layout",
    "state_bytes",
]
