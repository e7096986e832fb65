"""Streaming: module hooks, the learned order, fetching and evicting buckets, gradients on their way to the host."""

from offload_engine.streaming.activations import ActivationStore, offloadable
from offload_engine.streaming.exchange import GradientExchange
from offload_engine.streaming.external import ExternalChanges, Touched
from offload_engine.streaming.gradients import GradientStore
from offload_engine.streaming.hooks import Streamer
from offload_engine.streaming.lanelog import LaneLog
from offload_engine.streaming.micro_batches import LossFunction, MicroBatches, MicroBatchOrder
from offload_engine.streaming.order import UseOrder
from offload_engine.streaming.release import GradientRelease, gradient_store, landing_slabs
from offload_engine.streaming.residency import ResidencyManager
from offload_engine.streaming.runs import runs_of
from offload_engine.streaming.structures import map_tensors, moved

__all__ = [
    "ActivationStore",
    "ExternalChanges",
    "GradientExchange",
    "GradientRelease",
    "GradientStore",
    "LaneLog",
    "LossFunction",
    "MicroBatchOrder",
    "MicroBatches",
    "ResidencyManager",
    "Streamer",
    "Touched",
    "UseOrder",
    "map_tensors",
    "gradient_store",
    "landing_slabs",
    "moved",
    "offloadable",
    "runs_of",
]
