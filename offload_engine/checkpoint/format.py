"""Files of a checkpoint: tensors in safetensors files, facts in JSON, both in a folder that is replaced as a whole.

Called by saving, loading and export. Invariants: writing holds one tensor at a time; the previous checkpoint stays
loadable until the new one is whole, at whatever moment the process dies; nothing is pickled.

Note: swapping folders
    A folder cannot be renamed over a full one. So `<name>` is written as `.<name>.writing`, flushed to disk, marked
    with `format.json`, renamed to `.<name>.new`; the old one is renamed to `.<name>.old`; `.new` is renamed to
    `<name>`; `.old` is deleted. A folder under one of the last three names is whole, since it got there by rename.
    `resolve` takes `<name>`, else `.new`, else `.old`; the next writer finishes an interrupted swap first.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias

import safetensors
import torch

from offload_engine.errors import CheckpointError, HostMemoryError

MARKER = "format.json"
"""The file that tells a finished checkpoint folder from any other folder."""

FORMAT = "offload-engine checkpoint"
VERSION = 1

_MAPPED_BYTES = 1 << 20
"""How much of a file may be read before it is mapped anew: pages of a mapping count as memory of the process."""

TensorItem: TypeAlias = tuple[str, torch.dtype, Sequence[int], Callable[[], torch.Tensor]]

_DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def write_tensors(
    path: str | PathLike[str], items: Iterable[TensorItem], metadata: Mapping[str, str] | None = None
) -> dict[str, int]:
    """Write tensors into one safetensors file, one at a time; the file appears whole or not at all.

    Args:
        path: the file; its folder must exist.
        items: (name, dtype, shape, make). `make` is called when its turn comes, wide dtypes first, else in the
            given order, so that every tensor lies aligned in the file; its tensor may be on any device, is copied
            to the CPU if need be, and is let go of before the next call.
        metadata: text for the file's header.

    Returns:
        Name -> CRC-32 of the tensor's bytes, for `TensorFile.checksums`.

    Raises:
        CheckpointError: a name comes twice, a dtype has no place in the format, a tensor is not what its item said,
            or the file system refuses (disk full, say).
    """
    ordered = sorted(items, key=lambda item: -item[1].itemsize)
    header = _header(path, ordered, dict(metadata or {}))
    with _replacing(Path(path)) as temporary, open(temporary, "wb") as file:
        file.write(len(header).to_bytes(8, "little"))
        file.write(header)
        checksums = {
            name: _write_tensor(file, path, name, dtype, shape, make())
            for name, dtype, shape, make in ordered
        }
        _flush_to_disk(file)
    return checksums


def _header(path: str | PathLike[str], items: list[TensorItem], metadata: dict[str, str]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    offset_bytes = 0
    for name, dtype, shape, _ in items:
        if name in entries or name == "__metadata__":
            raise CheckpointError(
                f"'{path}': tensor name '{name}' comes twice or is reserved; give each its own name."
            )
        if dtype not in _DTYPE_NAMES:
            raise CheckpointError(
                f"'{path}': tensor '{name}' is {dtype}, which safetensors files cannot hold. Convert it to one of "
                f"{', '.join(_DTYPE_NAMES.values())}."
            )
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        entries[name] = {
            "dtype": _DTYPE_NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [offset_bytes, offset_bytes + nbytes],
        }
        offset_bytes += nbytes
    header = json.dumps(entries, separators=(",", ":")).encode()
    return header + b" " * (-len(header) % 8)


def _write_tensor(
    file: Any,
    path: str | PathLike[str],
    name: str,
    dtype: torch.dtype,
    shape: Sequence[int],
    tensor: torch.Tensor,
) -> int:
    if tensor.dtype != dtype or tuple(tensor.shape) != tuple(shape):
        raise CheckpointError(
            f"'{path}': tensor '{name}' was announced as {dtype} {tuple(shape)} but is {tensor.dtype} "
            f"{tuple(tensor.shape)}. A parameter changed after wrapping; restore its shape and dtype before saving."
        )
    content = _bytes_of(tensor)
    file.write(content)
    return zlib.crc32(content)


def _bytes_of(tensor: torch.Tensor) -> Any:
    if tensor.numel() == 0:
        return b""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data


class TensorFile:
    """Reads one safetensors file, one tensor at a time. Use as a context manager, or call `close()`.

    Owns: a private mapping of the file; tensors returned by `get` are views of it and keep it alive. After every
    `_MAPPED_BYTES` it maps the file anew, so that what was read, and let go of, is no memory of the process any more.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise CheckpointError(
                f"there is no file '{path}'; something is missing. Load an older checkpoint, or fetch it anew."
            )
        self.checksums: Mapping[str, int] = {}
        """What `write_tensors` has returned: tensors that it names are compared with it when they are read."""
        self._file: Any = None
        self._map()
        self._names = frozenset(self._open().keys())

    def _map(self) -> None:
        self.close()
        try:
            opened: Any = safetensors.safe_open(self.path, framework="pt", device="cpu")
            self._file = opened.__enter__()
        except (safetensors.SafetensorError, OSError, ValueError, RuntimeError) as error:
            if os.strerror(errno.ENOMEM) in str(
                error
            ):  # the file is mapped privately: that counts, read or not
                raise HostMemoryError(
                    f"there is no room to map '{self.path}': {error}. The file may be whole. Free memory, or raise the "
                    f"process's limits (ulimit -v, ulimit -d)."
                ) from error
            raise _damaged(self.path, error) from error
        self._read_bytes = 0

    def keys(self) -> list[str]:
        """Return the names in the file, sorted."""
        return sorted(self._names)

    def __contains__(self, name: object) -> bool:
        """Return whether the file holds a tensor of that name."""
        return name in self._names

    def metadata(self) -> dict[str, str]:
        """Return the text of the file's header."""
        return dict(self._open().metadata() or {})

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape without reading it."""
        self._check(name)
        return tuple(self._open().get_slice(name).get_shape())

    def get(self, name: str) -> torch.Tensor:
        """Return one tensor on the CPU, a view of the file's mapping: copy it where it is to live on.

        Raises:
            CheckpointError: the file has no such tensor, or is damaged.
        """
        self._check(name)
        if self._file is not None and self._read_bytes > _MAPPED_BYTES:
            self._map()
        try:
            tensor: torch.Tensor = self._open().get_tensor(name)
        except (safetensors.SafetensorError, OSError, ValueError, RuntimeError) as error:
            raise _damaged(self.path, error) from error
        self._read_bytes += tensor.nbytes
        if name in self.checksums and zlib.crc32(_bytes_of(tensor)) != self.checksums[name]:
            raise _damaged(self.path, f"the bytes of '{name}' are not those that were written")
        return tensor

    def close(self) -> None:
        """Close the file; idempotent. Tensors that were returned stay valid."""
        file, self._file = self._file, None
        if file is not None:
            file.__exit__(None, None, None)

    def __enter__(self) -> TensorFile:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the file."""
        self.close()

    def _open(self) -> Any:
        if self._file is None:
            raise CheckpointError(f"'{self.path}' was closed; open it again with open_tensors.")
        return self._file

    def _check(self, name: str) -> None:
        if name not in self._names:
            raise CheckpointError(
                f"'{self.path}' has no tensor '{name}' among its {len(self._names)}. The checkpoint belongs to another "
                "model, or to another version of it."
            )


def open_tensors(path: str | PathLike[str]) -> TensorFile:
    """Open a safetensors file for reading one tensor at a time.

    Raises:
        CheckpointError: the file is missing, truncated or damaged; the message names it.
        HostMemoryError: the process may not map it.
    """
    return TensorFile(path)


def write_json(path: str | PathLike[str], value: object) -> None:
    """Write plain values as indented JSON; the file appears whole or not at all."""
    try:
        text = json.dumps(value, indent=2, allow_nan=True) + "\n"
    except TypeError as error:
        raise CheckpointError(
            f"'{path}': {error}. Save plain values (None, bool, int, float, str, list, dict), and tensors as tensors."
        ) from error
    with _replacing(Path(path)) as temporary, open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        _flush_to_disk(file)


def read_json(path: str | PathLike[str]) -> Any:
    """Read what `write_json` wrote.

    Raises:
        CheckpointError: the file is missing or damaged; the message names it.
    """
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"there is no file '{path}'; something is missing. Load an older checkpoint, or fetch it anew."
        ) from None
    except (OSError, ValueError) as error:
        raise _damaged(Path(path), error) from error


@contextmanager
def atomic_directory(path: str | PathLike[str]) -> Iterator[Path]:
    """Give an empty folder to write into; when the block ends well, it replaces `path` as a whole.

    An exception in the block, or a crash at any moment, leaves the old folder loadable through `resolve`. See "Note:
    swapping folders". One writer at a time.

    Raises:
        CheckpointError: `path` is a file, or a folder with content that is no checkpoint and so is not replaced.
    """
    target = Path(path).resolve()
    _refuse_foreign(target)
    _finish_swap(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    writing, new, old = (_sibling(target, step) for step in ("writing", "new", "old"))
    writing.mkdir()
    try:
        yield writing
        write_json(writing / MARKER, {"format": FORMAT, "version": VERSION})
        _sync_tree(writing)
        os.rename(writing, new)
    except BaseException:
        shutil.rmtree(writing, ignore_errors=True)
        raise
    if target.is_dir():
        os.rename(target, old)
    os.rename(new, target)
    _sync_folder(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def resolve(path: str | PathLike[str]) -> Path:
    """Return the folder that holds the whole checkpoint `path`, also after a crash in the middle of a swap.

    Raises:
        CheckpointError: there is none, or the folder is no finished checkpoint, or of an unknown version.
    """
    target = Path(path).resolve()
    for folder in (target, _sibling(target, "new"), _sibling(target, "old")):
        if (folder / MARKER).is_file():
            _check_marker(folder)
            return folder
    if target.is_dir():
        raise CheckpointError(
            f"'{path}' is a folder without '{MARKER}': not a finished checkpoint. Name a folder that engine.save wrote."
        )
    raise CheckpointError(f"there is no checkpoint '{path}'. Name a folder that engine.save wrote.")


def _check_marker(folder: Path) -> None:
    marker = read_json(folder / MARKER)
    found = (marker.get("format"), marker.get("version")) if isinstance(marker, dict) else (None, None)
    if found != (FORMAT, VERSION):
        raise CheckpointError(
            f"'{folder / MARKER}' says {found[0]!r} version {found[1]!r}; this package reads {FORMAT!r} version "
            f"{VERSION}. Load it with the version that wrote it."
        )


def _finish_swap(target: Path) -> None:
    """Bring the folders of an interrupted swap into order: afterwards only `target` or nothing is there."""
    writing, new, old = (_sibling(target, step) for step in ("writing", "new", "old"))
    if not (target / MARKER).is_file():
        for whole in (new, old):
            if (whole / MARKER).is_file():
                if target.is_dir():
                    target.rmdir()  # made by someone meanwhile, and empty
                os.rename(whole, target)
                break
    for leftover in (writing, new, old):
        if leftover.is_dir():
            shutil.rmtree(leftover)


def _refuse_foreign(target: Path) -> None:
    if target.exists() and not target.is_dir():
        raise CheckpointError(f"'{target}' is a file; a checkpoint is a folder. Name another path.")
    if target.is_dir() and any(target.iterdir()) and not (target / MARKER).is_file():
        raise CheckpointError(
            f"'{target}' holds files but no '{MARKER}': it is not a checkpoint and will not be replaced. Name a new or "
            "empty folder."
        )


def _sibling(target: Path, step: str) -> Path:
    return target.with_name(f".{target.name}.{step}")


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """Give a temporary name beside `path`, renamed over it at the end; turn file-system errors into ours."""
    temporary = path.with_name(f".{path.name}.writing")
    try:
        yield temporary
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise CheckpointError(
            f"'{path}' could not be written: {error}. Free space or choose another folder; the old file is untouched."
        ) from error
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _flush_to_disk(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


def _sync_tree(folder: Path) -> None:
    """Flush every file and folder below `folder`, those written by others included."""
    for entry in folder.rglob("*"):
        if entry.is_dir():
            _sync_folder(entry)
        elif entry.is_file():
            with open(entry, "rb") as file:
                os.fsync(file.fileno())
    _sync_folder(folder)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        pass  # some network file systems refuse to flush a folder; the rename is still atomic there
    finally:
        os.close(descriptor)


def _damaged(path: Path, error: BaseException | str) -> CheckpointError:
    return CheckpointError(
        f"'{path}' is damaged or incomplete: {error}. Load an older checkpoint, or fetch the file anew."
    )


def some_names(words: str, names: Iterable[str]) -> str:
    """Return `words` and the first of `names`; nothing if there are none."""
    names = list(names)
    if not names:
        return ""
    shown = ", ".join(f"'{name}'" for name in names[:5])
    return f"{words} {shown}{f' and {len(names) - 5} more' if len(names) > 5 else ''}"
