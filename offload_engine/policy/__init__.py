"""The policy: which plan to follow, and whether it can be carried out."""

from offload_engine.policy.fixed import check_plan, plan_of, spared_buckets

__all__ = ["check_plan", "plan_of", "spared_buckets"]
