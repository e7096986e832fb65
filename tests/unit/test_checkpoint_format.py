"""The checkpoint's files: readable by safetensors, written one tensor at a time, never half there."""

from __future__ import annotations

import json
import os
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from offload_engine.checkpoint import format as checkpoint_format
from offload_engine.checkpoint.format import (
    MARKER,
    TensorItem,
    atomic_directory,
    open_tensors,
    read_json,
    resolve,
    write_json,
    write_tensors,
)
from offload_engine.errors import CheckpointError, HostMemoryError
from offload_engine.host import rss_bytes

MIB = 1 << 20


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def items(tensors: dict[str, torch.Tensor]) -> list[TensorItem]:
    return [(name, t.dtype, t.shape, lambda t=t: t) for name, t in tensors.items()]  # type: ignore[misc]


def samples() -> dict[str, torch.Tensor]:
    return {
        "half": torch.randn(7).half(),
        "layers.0.weight": torch.randn(15, 17),
        "bf16 odd": torch.randn(3, 5).bfloat16(),
        "float8": torch.randn(5).to(torch.float8_e4m3fn),
        "mask": torch.tensor([True, False, True]),
        "double": torch.randn(3, dtype=torch.float64),
        "scalar": torch.tensor(12345678901),
        "empty": torch.empty(0, 4),
        "transposed": torch.randn(4, 6).t(),
        "part of a larger one": torch.randn(100)[10:20:3],
        "needs grad": torch.randn(4, requires_grad=True),
        "ünïcode": torch.arange(4, dtype=torch.int16),
    }


def test_the_file_is_a_safetensors_file(tmp_path: Path) -> None:
    path, tensors = tmp_path / "x.safetensors", samples()
    write_tensors(path, items(tensors), {"step": "12", "text": 'quotes " and ünïcode'})
    by_library = load_file(path)
    with open_tensors(path) as reader:
        assert reader.keys() == sorted(tensors)
        assert reader.metadata() == {"step": "12", "text": 'quotes " and ünïcode'}
        for name, tensor in tensors.items():
            assert name in reader
            assert reader.shape(name) == tuple(tensor.shape)
            for read in (by_library[name], reader.get(name)):
                assert read.dtype == tensor.dtype
                assert read.shape == tensor.shape
                assert torch.equal(bits(read), bits(tensor)), name
    assert os.listdir(tmp_path) == ["x.safetensors"]


def test_tensors_lie_aligned_and_in_order_within_a_dtype(tmp_path: Path) -> None:
    path, made = tmp_path / "x.safetensors", []

    def make(name: str, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        return lambda: made.append(name) or tensor  # type: ignore[func-returns-value]

    tensors = samples()
    write_tensors(path, [(name, t.dtype, t.shape, make(name, t)) for name, t in tensors.items()])
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    assert length % 8 == 0
    for name, entry in header.items():
        assert entry["data_offsets"][0] % tensors[name].element_size() == 0
    assert len(raw) == 8 + length + sum(t.numel() * t.element_size() for t in tensors.values())
    assert [name for name in made if tensors[name].dtype == torch.float32] == [
        "layers.0.weight",
        "empty",
        "transposed",
        "part of a larger one",
        "needs grad",
    ]


def test_writing_holds_one_tensor_at_a_time(tmp_path: Path) -> None:
    numel = 4 * MIB
    made: list[weakref.ref[torch.Tensor]] = []
    living: list[int] = []
    extra_bytes: list[int] = []
    before_bytes = rss_bytes()

    def make() -> torch.Tensor:
        living.append(sum(reference() is not None for reference in made))
        tensor = torch.full((numel,), 1.5)
        extra_bytes.append(rss_bytes() - before_bytes)
        made.append(weakref.ref(tensor))
        return tensor

    write_tensors(tmp_path / "x", [(f"t{i}", torch.float32, (numel,), make) for i in range(8)])
    assert living == [0] * 8
    # The allocator may keep one freed block; eight tensors would be 128 MiB.
    assert max(extra_bytes) < 3 * 4 * numel
    assert (tmp_path / "x").stat().st_size > 8 * 4 * numel


def test_tensors_that_were_read_outlive_the_reader_and_the_file(tmp_path: Path) -> None:
    path, tensor = tmp_path / "x", torch.randn(1000)
    write_tensors(path, items({"a": tensor}))
    reader = open_tensors(path)
    read = reader.get("a")
    reader.close()
    reader.close()
    write_tensors(path, items({"a": torch.zeros(1000)}))
    path.unlink()
    read += 0  # a private mapping: writing is allowed and changes no file
    assert torch.equal(read, tensor)
    with pytest.raises(CheckpointError, match="was closed"):
        reader.get("a")


@pytest.mark.parametrize(
    "damage", ["truncated", "short header", "no header", "garbage header", "tail", "empty", "absent"]
)
def test_a_damaged_file_is_named(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "model.safetensors"
    write_tensors(path, items(samples()))
    raw = path.read_bytes()
    damaged = {
        "truncated": raw[:-1],
        "short header": raw[:100],
        "no header": raw[:5],
        "garbage header": raw[:8] + b"x" * 40 + raw[48:],
        "tail": raw + b"x",
        "empty": b"",
        "absent": None,
    }[damage]
    path.unlink()
    if damaged is not None:
        path.write_bytes(damaged)
    with pytest.raises(CheckpointError, match="model.safetensors"):
        open_tensors(path)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    write_tensors(tmp_path / "x", items({"a": torch.ones(1)}))
    with open_tensors(tmp_path / "x") as reader:
        assert "b" not in reader
        for read in (reader.get, reader.shape):
            with pytest.raises(CheckpointError, match="has no tensor 'b'"):
                read("b")


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (
            [
                ("a", torch.float32, (2,), lambda: torch.ones(2)),
                ("a", torch.float32, (2,), lambda: torch.ones(2)),
            ],
            "twice",
        ),
        ([("__metadata__", torch.float32, (2,), lambda: torch.ones(2))], "reserved"),
        ([("a", torch.complex64, (2,), lambda: torch.ones(2, dtype=torch.complex64))], "cannot hold"),
        (
            [("a", torch.float32, (2,), lambda: torch.ones(3))],
            r"announced as torch.float32 \(2,\) but is .* \(3,\)",
        ),
        ([("a", torch.float32, (2,), lambda: torch.ones(2).half())], "but is torch.float16"),
    ],
)
def test_wrong_items_are_told_and_leave_the_old_file(
    tmp_path: Path, bad: list[TensorItem], message: str
) -> None:
    path = tmp_path / "x"
    write_tensors(path, items({"old": torch.ones(3)}))
    with pytest.raises(CheckpointError, match=message):
        write_tensors(path, bad)
    with open_tensors(path) as reader:
        assert reader.keys() == ["old"]
    assert os.listdir(tmp_path) == ["x"]


def test_a_full_disk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_json(tmp_path / "x", 1)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    for write in (lambda: write_json(tmp_path / "x", 2), lambda: write_tensors(tmp_path / "x", [])):
        with pytest.raises(CheckpointError, match=r"'.*x' could not be written: .*No space left"):
            write()
    assert read_json(tmp_path / "x") == 1
    assert os.listdir(tmp_path) == ["x"]


def test_json_round_trip_and_errors(tmp_path: Path) -> None:
    value = {"a": [1, 2.5, None, True, "ü"], "tiny": 5e-324, "third": 1 / 3, "big": 2**60}
    write_json(tmp_path / "x.json", value)
    assert read_json(tmp_path / "x.json") == value
    with pytest.raises(CheckpointError, match="plain values"):
        write_json(tmp_path / "x.json", {"a": torch.ones(1)})
    assert read_json(tmp_path / "x.json") == value
    (tmp_path / "x.json").write_text('{"a": ')
    with pytest.raises(CheckpointError, match=r"x\.json' is damaged"):
        read_json(tmp_path / "x.json")
    with pytest.raises(CheckpointError, match=r"no file '.*y\.json'"):
        read_json(tmp_path / "y.json")


# --- folders -------------------------------------------------------------------------------------------------------


def write_checkpoint(path: Path, value: float, during: Callable[[], None] = lambda: None) -> None:
    def make() -> torch.Tensor:
        during()
        return torch.full((33,), value)

    with atomic_directory(path) as folder:
        during()
        write_tensors(folder / "a.safetensors", [("a", torch.float32, (33,), make)])
        during()
        (folder / "sub").mkdir()
        write_json(folder / "sub" / "state.json", {"value": value})
        during()


def read_checkpoint(path: Path) -> float:
    folder = resolve(path)
    value = float(read_json(folder / "sub" / "state.json")["value"])
    with open_tensors(folder / "a.safetensors") as reader:
        assert torch.equal(reader.get("a"), torch.full((33,), value))
    return value


def only_checkpoint(parent: Path) -> None:
    assert os.listdir(parent) == ["ckpt"]


def test_a_folder_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    for value in (1.0, 2.0, 3.0):
        write_checkpoint(path, value)
        assert read_checkpoint(path) == value
        assert resolve(path) == path
        only_checkpoint(tmp_path)


class Killed(BaseException):
    """Stands for the end of the process."""


STEPS = ("rename", "replace", "fsync", "mkdir")


def watch(monkeypatch: pytest.MonkeyPatch, before: Callable[[], None]) -> None:
    """Call `before` ahead of every step that changes the disk, `rmtree` included."""

    def watched(function: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            before()
            return function(*args, **kwargs)

        return call

    for name in STEPS:
        monkeypatch.setattr(os, name, watched(getattr(os, name)))
    monkeypatch.setattr(shutil, "rmtree", watched(shutil.rmtree))


@pytest.mark.parametrize("old", [None, 1.0])
def test_the_old_or_the_new_one_is_loadable_whenever_the_process_dies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: float | None
) -> None:
    """Take a copy of the disk ahead of every step, as a crash there would leave it, and go on from each copy."""
    live = tmp_path / "live"
    live.mkdir()
    if old is not None:
        write_checkpoint(live / "ckpt", old)
    copies: list[Path] = []
    with monkeypatch.context() as patch:
        busy = False

        def snapshot() -> None:
            nonlocal busy
            if not busy:
                busy = True
                copies.append(tmp_path / f"copy{len(copies)}")
                shutil.copytree(live, copies[-1])
                busy = False

        watch(patch, snapshot)
        write_checkpoint(live / "ckpt", 2.0, during=snapshot)
    assert len(copies) > 15
    assert any((copy / ".ckpt.new").exists() for copy in copies)
    assert any((copy / ".ckpt.old").exists() for copy in copies) == (old is not None)
    seen: list[float | None] = []
    for copy in copies:
        try:
            seen.append(read_checkpoint(copy / "ckpt"))
        except CheckpointError as error:
            assert old is None and "there is no checkpoint" in str(error)
            seen.append(None)
        write_checkpoint(copy / "ckpt", 3.0)
        assert read_checkpoint(copy / "ckpt") == 3.0
        only_checkpoint(copy)
    change = seen.index(2.0)
    assert seen[:change] == [old] * change, "the old one until the swap"
    assert seen[change:] == [2.0] * (len(seen) - change), "the new one from then on"


@pytest.mark.parametrize("kill", [OSError, Killed])
def test_the_old_one_is_loadable_when_any_step_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kill: type[BaseException]
) -> None:
    stage, finished = 0, False
    while not finished:
        parent = tmp_path / str(stage)
        parent.mkdir()
        write_checkpoint(parent / "ckpt", 1.0)
        calls = 0

        def count(fail_at: int = stage) -> None:
            nonlocal calls
            calls += 1
            if calls - 1 == fail_at:
                raise kill("stop here")

        with monkeypatch.context() as patch:
            watch(patch, count)
            try:
                write_checkpoint(parent / "ckpt", 2.0, during=count)
            except (kill, CheckpointError):
                pass
            finished = calls <= stage
        assert read_checkpoint(parent / "ckpt") in (1.0, 2.0)
        write_checkpoint(parent / "ckpt", 3.0)
        assert read_checkpoint(parent / "ckpt") == 3.0
        only_checkpoint(parent)
        stage += 1
    assert stage > 15


def test_an_exception_in_the_block_leaves_only_the_old_one(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "ckpt", 1.0)
    with pytest.raises(ZeroDivisionError), atomic_directory(tmp_path / "ckpt") as folder:
        (folder / "half").write_text("x")
        1 / 0
    assert read_checkpoint(tmp_path / "ckpt") == 1.0
    only_checkpoint(tmp_path)


def test_a_folder_that_is_no_checkpoint_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.tex").write_text("x")
    with pytest.raises(CheckpointError, match="will not be replaced"), atomic_directory(tmp_path / "thesis"):
        pass
    assert (tmp_path / "thesis" / "chapter1.tex").read_text() == "x"
    with pytest.raises(CheckpointError, match="not a finished checkpoint"):
        resolve(tmp_path / "thesis")
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="is a file"), atomic_directory(tmp_path / "file"):
        pass
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        resolve(tmp_path / "nowhere")


def test_an_empty_folder_in_the_way_does_not_cost_the_old_checkpoint(tmp_path: Path) -> None:
    """A process died between the two renames; before the next save someone made the folder again."""
    write_checkpoint(tmp_path / "ckpt", 1.0)
    os.rename(tmp_path / "ckpt", tmp_path / ".ckpt.old")
    (tmp_path / "ckpt").mkdir()
    assert read_checkpoint(tmp_path / "ckpt") == 1.0
    with pytest.raises(Killed), atomic_directory(tmp_path / "ckpt"):
        raise Killed
    assert read_checkpoint(tmp_path / "ckpt") == 1.0


def test_a_link_to_a_folder_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "big disk").mkdir()
    (tmp_path / "ckpt").symlink_to(tmp_path / "big disk", target_is_directory=True)
    write_checkpoint(tmp_path / "ckpt", 1.0)
    write_checkpoint(tmp_path / "ckpt", 2.0)
    assert (tmp_path / "ckpt").is_symlink()
    assert read_checkpoint(tmp_path / "big disk") == 2.0


def test_parents_are_made(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "runs" / "a" / "ckpt", 1.0)
    assert read_checkpoint(tmp_path / "runs" / "a" / "ckpt") == 1.0


@pytest.mark.parametrize("marker", ['{"format": "another", "version": 1}', "[]", "{", '{"version": 99}'])
def test_a_marker_of_another_format_is_refused(tmp_path: Path, marker: str) -> None:
    write_checkpoint(tmp_path / "ckpt", 1.0)
    (tmp_path / "ckpt" / MARKER).write_text(marker)
    with pytest.raises(CheckpointError, match=MARKER.replace(".", r"\.")):
        resolve(tmp_path / "ckpt")


def test_no_pickle_is_read_or_written() -> None:
    source = Path(checkpoint_format.__file__).read_text()
    assert "torch.load" not in source and "torch.save" not in source and "import pickle" not in source


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_a_file_that_cannot_be_mapped_is_not_called_damaged(tmp_path: Path) -> None:
    """A limit on the process's memory counts the mapping whole: that is what the error says, and the file is good."""
    import resource

    path = tmp_path / "large.safetensors"
    write_tensors(path, items({"a": torch.ones(96 * MIB // 4)}))
    status = Path("/proc/self/status").read_text()
    used = 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmData")))
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    try:
        resource.setrlimit(resource.RLIMIT_DATA, (used + 48 * MIB, hard))
        with pytest.raises(HostMemoryError, match=r"no room to map .*large\.safetensors.*ulimit"):
            open_tensors(path)
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
    with open_tensors(path) as file:
        assert file.keys() == ["a"]
