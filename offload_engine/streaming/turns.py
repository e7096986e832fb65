"""Turns: threads of which one runs at a time, each until it hands over, with the torch state of whoever made them.

Used where a model's forward or backward has to stop in its middle and go on later. Called by `layer_major`. Invariant:
between two calls of `resume` no turn runs; a turn that was cancelled has ended when `cancel` returns.
"""

from __future__ import annotations

import contextvars
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

import torch

from offload_engine.device import Device
from offload_engine.device.torch_modes import current_modes, using_modes

__all__ = ["TorchState", "Turn"]


class Cancelled(BaseException):
    """Raised inside a turn that shall end; not an Exception, so that no model catches it."""


class TorchState:
    """What torch keeps per thread, as this thread has it now: how many threads an operator uses, modes,
    autocast, hooks of saved tensors, device.
    """

    def __init__(self, device: Device) -> None:
        self._compute_here = device.compute_place()
        self._threads = torch.get_num_threads()
        self._modes = current_modes()
        kinds = dict.fromkeys(("cpu", device.torch_device.type))
        self._autocast = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled())
            for kind in kinds
            if torch.is_autocast_enabled(kind)
        ]
        self._saved_hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Give the calling thread that state. Backwards of this thread run on it alone, also those of a device."""
        self._compute_here()
        torch.set_num_threads(self._threads)  # sums are split among them, so they decide about bits
        with ExitStack() as stack:
            stack.enter_context(using_modes(self._modes))
            for kind, dtype, cached in self._autocast:
                stack.enter_context(torch.autocast(kind, dtype, cache_enabled=cached))
            if self._saved_hooks is not None:
                pack, unpack = self._saved_hooks
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, unpack))
            # Else all backwards share one thread per device, and one that pauses would hold up the others.
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            yield


class Turn:
    """One thread of control. Owns: its thread, from the first `resume` until `body` has ended."""

    def __init__(self, name: str, body: Callable[[], None], state: TorchState) -> None:
        self._body = body
        self._state = state
        self._go: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._back: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._cancelled = False
        self._error: BaseException | None = None
        self.started = False
        self.done = False
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(self._run,), name=name, daemon=True)

    def _run(self) -> None:
        try:
            with self._state.applied():
                self._wait()
                self._body()
        except Cancelled:
            pass
        except BaseException as error:
            self._error = error
        finally:
            self.done = True
            self._back.put(None)

    def _wait(self) -> None:
        if not self._cancelled:  # else it is on its way out, and nobody resumes it any more
            self._go.get()
        if self._cancelled:
            raise Cancelled

    def resume(self) -> None:
        """Let it run until it pauses or ends. Raises what it has raised."""
        if not self.started:
            self._thread.start()
            self.started = True
        self._go.put(None)
        self._back.get()
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        if self.done:
            self._thread.join()

    def pause(self) -> None:
        """Hand over to whoever resumed; called by the turn itself. Raises `Cancelled` where it shall not go on."""
        if not self._cancelled:
            self._back.put(None)
        self._wait()

    def cancel(self) -> None:
        """Make it end, and wait for that: at its next pause, if it runs (an interrupt has left it so). Idempotent."""
        self._cancelled = True
        while self.started and self._thread.is_alive():
            self._go.put(None)
            with suppress(KeyboardInterrupt):  # what led here is about to be raised anyway
                self._thread.join()
