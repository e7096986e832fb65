"""The optimizer: the facade that users see, the CPU update pipeline, exact clipping, the guard over pending values."""

from offload_engine.optim.clipping import clip_factor, global_norm, scale_gradients
from offload_engine.optim.groups import check_groups, check_optimizer, settings_of
from offload_engine.optim.optimizer import OffloadOptimizer, check_states
from offload_engine.optim.update import UpdatePipeline

__all__ = [
    "OffloadOptimizer",
    "UpdatePipeline",
    "check_groups",
    "check_optimizer",
    "check_states",
    "clip_factor",
    "global_norm",
    "scale_gradients",
    "settings_of",
]
