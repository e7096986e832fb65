"""The optimizer: the facade that users see, updates where and when the plan says, exact clipping, the loss scale."""

from offload_engine.optim.clipping import clip_factor, global_norm, scale_gradients
from offload_engine.optim.device_update import DeviceUpdates, device_update_bytes
from offload_engine.optim.groups import check_optimizer, state_keys, updates_matrices
from offload_engine.optim.lion import Lion
from offload_engine.optim.muon import Muon
from offload_engine.optim.optimizer import OffloadOptimizer, check_states
from offload_engine.optim.sign_sgd import SignSGD
from offload_engine.optim.step import Stepper
from offload_engine.optim.update import UpdatePipeline

__all__ = [
    "DeviceUpdates",
    "Lion",
    "Muon",
    "OffloadOptimizer",
    "SignSGD",
    "Stepper",
    "UpdatePipeline",
    "check_optimizer",
    "check_states",
    "clip_factor",
    "device_update_bytes",
    "global_norm",
    "scale_gradients",
    "state_keys",
    "updates_matrices",
]
