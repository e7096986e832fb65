"""The policy: which plan to follow, and whether it can be carried out."""

from offload_engine.policy.facts import RunFacts, facts_of
from offload_engine.policy.fixed import check_plan, plan_of, spared_buckets
from offload_engine.policy.overlaps import Overlap, overlaps, run_summary, setup_lines

__all__ = [
    "Overlap",
    "RunFacts",
    "check_plan",
    "facts_of",
    "overlaps",
    "plan_of",
    "run_summary",
    "setup_lines",
    "spared_buckets",
]
