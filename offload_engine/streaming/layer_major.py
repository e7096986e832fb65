"""Layer-major order: several micro-batches go through the model block by block, so that each weight is fetched once.

Called by the engine's `train_batch`. Invariant: each micro-batch's forward and backward are its own, whole and in
autograd's order; what is interleaved are only their stretches. So the numbers are those of one micro-batch after the
other, except that random operators draw from other streams.

Note: how it works.
    Each micro-batch has a turn (a thread that runs only when resumed). In forward it pauses where it enters a block,
    and where it leaves the last one. In backward it pauses where the gradient of a block's input is complete, that is,
    when the block's own backward is over. Everybody at one such place goes on, in order, before anybody goes on from
    the next. So a parameter's gradients come in the order of the micro-batches, each summed by autograd over all uses
    of the parameter (a tied embedding's head and embedding, say), and are added as they come. Only reentrant
    checkpointing of several blocks that share a parameter hands out its gradient in parts; those of one micro-batch
    then come between those of others, and the sum is the same but for rounding.

Note: randomness.
    A pause must not change what a recomputation (activation checkpointing) draws, so every micro-batch has a stream of
    its own: the first goes on with torch's generators as they are, the others start from seeds made of their state.
    Afterwards the generators stand where the first micro-batch left them; where nobody has drawn, as before.

Note: cost.
    The activations of all micro-batches are on the device at once, and of a parameter that several blocks use, the
    gradient parts of each micro-batch from the first part to the last.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from offload_engine.device import Device
from offload_engine.device.generators import generator_states, restore_generators
from offload_engine.errors import UnsupportedError
from offload_engine.streaming.gradients import GradientStore
from offload_engine.streaming.hooks import Streamer
from offload_engine.streaming.order import UseOrder
from offload_engine.streaming.residency import ResidencyManager
from offload_engine.streaming.structures import tensors_in
from offload_engine.streaming.turns import TorchState, Turn

__all__ = ["LayerMajor"]

_log = logging.getLogger("offload_engine")
_no_modes = torch._C.DisableTorchFunction
_no_dispatch = torch._C._DisableTorchDispatch
_graph_task_id = torch._C._current_graph_task_id

_States = dict[str, torch.Tensor]
"""Device type -> state of its random generator."""


class _MicroBatch:
    """One micro-batch on its way through the model."""

    def __init__(self, number: int, generators: _States) -> None:
        self.number = number
        self.generators = generators
        self.turn: Turn
        self.place = -1
        """Where it has paused. Forward: the block that it is about to enter. Backward: the one whose input's gradient
        is complete. One more than the last block: behind the last one."""
        self.entered = -1
        """The last block that its forward has entered."""
        self.output: list[torch.Tensor] = []
        """What the last block has put out."""
        self.loss: torch.Tensor | None = None


class LayerMajor:
    """Runs micro-batches beside each other. Owns nothing between two calls.

    Args:
        blocks: (name, module), in the order in which the model runs them.
    """

    def __init__(
        self,
        blocks: Sequence[tuple[str, nn.Module]],
        streamer: Streamer,
        gradients: GradientStore,
        residency: ResidencyManager,
        order: UseOrder,
        device: Device,
    ) -> None:
        self._blocks = list(blocks)
        self._streamer = streamer
        self._gradients = gradients
        self._residency = residency
        self._order = order
        self._device = device
        self._current: _MicroBatch | None = None
        self._in_backward = False
        self._said_random = False

    def run(
        self, count: int, forward: Callable[[int], torch.Tensor], backward: Callable[[torch.Tensor], None]
    ) -> list[torch.Tensor]:
        """Run forward and backward of `count` micro-batches; return their losses, detached.

        Args:
            forward: takes the number of a micro-batch, runs the model, returns the loss.
            backward: takes that loss.

        Raises:
            UnsupportedError: a block was entered after one that comes behind it, which is seen before any backward; or
                one micro-batch's loss depends on another.
            Whatever `forward` or `backward` raises. No turn is left then, and gradients may be incomplete.
        """
        with _no_modes(), _no_dispatch():
            before = generator_states(self._device.torch_device)
            batches = [_MicroBatch(m, _stream(before, m)) for m in range(count)]
            starts = [batch.generators for batch in batches]
        state = TorchState(self._device)
        for batch in batches:
            body = partial(self._body, batch, forward, backward)
            batch.turn = Turn(f"offload-micro-batch-{batch.number}", body, state)
        base = self._gradients.micro_batch
        try:
            with self._hooked_blocks():
                self._streamer.begin_joint_forward()
                for place in range(-1, len(self._blocks) + 1):
                    self._resume_at(place, place, batches)
                self._streamer.end_joint_forward()
            self._leave_generators(before, starts, batches)
            self._in_backward = True
            for place in range(len(self._blocks) + 1, -1, -1):
                self._resume_at(place, place - 1, batches, base)
        finally:
            self._end(batches)
        return [batch.loss for batch in batches if batch.loss is not None]

    def _end(self, batches: Sequence[_MicroBatch]) -> None:
        """Cancel the turns that have not ended: the one that runs, if an interrupt has come, before all others."""
        for batch in sorted(batches, key=lambda batch: batch is not self._current):
            if not batch.turn.done:
                self._current = batch
                batch.turn.cancel()
            batch.output.clear()  # else it holds the graph whose hooks hold it
        self._current = None
        self._in_backward = False
        self._order.learning = True
        self._residency.used_again = frozenset()
        self._streamer.end_joint_forward()

    def _resume_at(
        self, place: int, block: int, batches: Sequence[_MicroBatch], base: int | None = None
    ) -> None:
        """Let every micro-batch that has paused at `place` go on, through a block: the last one in front of others."""
        waiting = [batch for batch in batches if batch.place == place and not batch.turn.done]
        for batch in waiting:
            self._current = batch
            self._order.learning = batch is waiting[0]
            self._residency.used_again = frozenset() if batch is waiting[-1] else self._used_by(block)
            if base is not None:
                self._gradients.micro_batch = base + batch.number
            batch.turn.resume()

    def _used_by(self, block: int) -> frozenset[int]:
        if 0 <= block < len(self._blocks):
            return self._streamer.buckets_in(self._blocks[block][1])
        return frozenset()

    # Inside a turn.

    def _body(
        self,
        batch: _MicroBatch,
        forward: Callable[[int], torch.Tensor],
        backward: Callable[[torch.Tensor], None],
    ) -> None:
        self._take_generators(batch)
        loss = forward(batch.number)
        for tensor in batch.output:
            self._watch(batch, tensor, batch.entered + 1)
        batch.output.clear()
        self._pause_forward(batch, len(self._blocks) + 1)
        backward(loss)
        batch.loss = loss.detach()

    def _pause_forward(self, batch: _MicroBatch, place: int) -> None:
        batch.place = place
        with _no_modes(), _no_dispatch():
            batch.generators = generator_states(self._device.torch_device)
        aside = self._streamer.put_aside()
        try:
            batch.turn.pause()
        finally:  # a cancelled turn, too, leaves the modules that it is in
            self._streamer.take_up(aside)
        if place <= len(self._blocks):
            self._take_generators(batch)

    def _watch(self, batch: _MicroBatch, tensor: torch.Tensor, place: int) -> None:
        """Pause in backward when the gradient of `tensor` is complete."""
        if tensor.requires_grad:
            tensor.register_hook(partial(self._pause_backward, batch, place))

    def _pause_backward(self, batch: _MicroBatch, place: int, _: torch.Tensor) -> None:
        current = self._current
        if not self._in_backward or current is None:
            return
        if batch is not current:
            raise UnsupportedError(
                f"order = 'layer_major': the loss of micro-batch {current.number} depends on what micro-batch "
                f"{batch.number} has computed. The model keeps a tensor of its forward on a module (an auxiliary loss, "
                f"a cache), where micro-batches that run beside each other overwrite it. Return it instead, or use "
                f"train_batch(..., order='micro_batch')."
            )
        if place < batch.place:
            batch.place = place
            batch.turn.pause()

    # Hooks of the blocks.

    @contextmanager
    def _hooked_blocks(self) -> Iterator[None]:
        handles: list[Any] = []
        try:
            for index, (_, block) in enumerate(self._blocks):
                enter = partial(self._enter, index)
                handles.append(block.register_forward_pre_hook(enter, prepend=True, with_kwargs=True))
            handles.append(self._blocks[-1][1].register_forward_hook(self._leave_last))
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, index: int, _: nn.Module, args: Any, kwargs: Any) -> None:
        batch = self._current
        if batch is None or _graph_task_id() != -1:
            return  # recomputed by a backward inside a forward
        if index <= batch.entered:
            names = [name for name, _ in self._blocks]
            raise UnsupportedError(
                f"order = 'layer_major' needs blocks that run one after the other, each once in a forward; in "
                f"micro-batch {batch.number}, '{names[index]}' was called after '{names[batch.entered]}'. Use "
                f"train_batch(..., order='micro_batch'), which takes any model and gives the same gradients."
            )
        for tensor in {id(tensor): tensor for tensor in tensors_in((args, kwargs))}.values():
            self._watch(batch, tensor, batch.entered + 1)
        self._pause_forward(batch, index)
        batch.entered = index

    def _leave_last(self, _: nn.Module, args: Any, output: Any) -> None:
        batch = self._current
        if batch is not None and _graph_task_id() == -1:
            # Watched later: under reentrant checkpointing it gets its place in the graph only now.
            batch.output = list(tensors_in(output))
            self._pause_forward(batch, len(self._blocks))

    # Random generators.

    def _take_generators(self, batch: _MicroBatch) -> None:
        with _no_modes(), _no_dispatch():
            restore_generators(batch.generators, self._device.torch_device)

    def _leave_generators(
        self, before: _States, starts: Sequence[_States], batches: Sequence[_MicroBatch]
    ) -> None:
        """Set the generators to the first stream that has moved, or as they were if none has."""
        with _no_modes(), _no_dispatch():
            moved = [
                batch.generators
                for batch, start in zip(batches, starts, strict=True)
                if any(not torch.equal(state, start[kind]) for kind, state in batch.generators.items())
            ]
            restore_generators(moved[0] if moved else before, self._device.torch_device)
        if len(moved) > 1 and not self._said_random:
            self._said_random = True
            _log.info(
                "layer-major order: the model draws random numbers (dropout?). Each micro-batch has its own stream: "
                "the same distribution as with order = 'micro_batch', not the same numbers"
            )


def _stream(states: _States, number: int) -> _States:
    """Return the start of a micro-batch's random stream: a function of the states and its number."""
    if number == 0:
        return states
    started = {}
    for kind, state in states.items():
        digest = hashlib.blake2b(
            state.numpy().tobytes() + number.to_bytes(8, "little"), digest_size=8
        ).digest()
        seed = int.from_bytes(digest, "little") >> 1
        started[kind] = torch.Generator(kind).manual_seed(seed).get_state()
    return started
