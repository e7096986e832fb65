"""The update kernels behind one interface: the native extension, or the numba fallback when a user asks for it by name.

`load` picks the backend and its instruction set; everything else is made through the `Backend` that it returns.
"""

from __future__ import annotations

import atexit
import functools
import importlib
from types import ModuleType

from offload_engine.errors import BuildError, ConfigError
from offload_engine.kernels import reference
from offload_engine.kernels.api import (
    NORM_BLOCK,
    Backend,
    Event,
    Lane,
    Rule,
    UpdateOut,
    UpdateSegment,
    WorkerPool,
)

_native: ModuleType | None
_import_error: ImportError | None = None
try:
    _native = importlib.import_module("offload_engine.kernels._native")
except ImportError as _error:
    _native, _import_error = None, _error
else:
    atexit.register(_native._abandon_all)

__all__ = [
    "NORM_BLOCK",
    "Backend",
    "Event",
    "Lane",
    "Rule",
    "UpdateOut",
    "UpdateSegment",
    "WorkerPool",
    "available_isas",
    "load",
    "reference",
]


def available_isas() -> list[str]:
    """Return the instruction sets that both this build and this CPU have, best first; empty without the extension."""
    return list(_native.available_isas()) if _native is not None else []


def load(backend: str = "auto", isa: str = "auto") -> Backend:
    """Return the kernels: "auto" and "native" take the extension, "numba" the fallback.

    Args:
        isa: "auto" for the best that this CPU has, or one of `available_isas()`.

    Raises:
        BuildError: the extension is missing or cannot be loaded.
        ConfigError: an unknown backend, or an instruction set that is not available.
    """
    if backend == "numba":
        if isa != "auto":
            raise ConfigError(
                f"isa = {isa!r} with kernels = 'numba', which compiles for this CPU. Set isa = 'auto'."
            )
        from offload_engine.kernels import numba_backend

        return numba_backend.backend()
    if backend not in ("auto", "native"):
        raise ConfigError(f"kernels = {backend!r} is unknown. Use 'auto', 'native' or 'numba'.")
    if _native is None:
        raise BuildError(
            f"the native extension is not there ({_import_error}). Install again with a C++17 compiler present "
            "(pip install --force-reinstall --no-deps, or `python setup.py build_ext --inplace` in a source tree), "
            "or set kernels = 'numba' in the config."
        ) from _import_error
    isas = _native.available_isas()
    chosen = isas[0] if isa == "auto" else isa
    if chosen not in isas:
        raise ConfigError(f"isa = {isa!r}, but this build and CPU have {', '.join(isas)}. Set isa = 'auto'.")
    return Backend(
        name="native",
        isa=chosen,
        Event=_native.Event,
        Lane=functools.partial(_native.Lane, isa=chosen),
        WorkerPool=_native.WorkerPool,
        note=f"this CPU and build have {', '.join(isas)}",
    )
