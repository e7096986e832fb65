"""Replicas on gloo ranks: the numbers of one process with all of the batch, the same bits on every rank."""

from __future__ import annotations

import contextlib
import functools
import threading
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import offload_engine as oe
from offload_engine import kernels
from offload_engine.config import ParallelConfig
from offload_engine.parallel.collectives import host_group, watchdog_of
from offload_engine.replicas import Replicas
from tests.distributed.ranks import RankFailedError, on_ranks

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(120)]
STEPS = 5
ROWS = 12  # 1, 2, 3 and 4 divide it


class Net(nn.Module):
    """Tied, frozen and sometimes unused parameters, and odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(31, 7)
        self.up = nn.Linear(7, 13)
        self.frozen = nn.Linear(13, 13).requires_grad_(False)
        self.extra = nn.Linear(13, 7)
        self.down = nn.Linear(13, 7)
        self.head = nn.Linear(7, 31, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor, extra: bool = False) -> torch.Tensor:
        hidden = torch.tanh(self.frozen(torch.tanh(self.up(self.embedding(ids)))))
        out: torch.Tensor = self.head(self.extra(hidden) if extra else self.down(hidden))
        return out


def rank_and_world() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def mine(step: int, micro: int = 0) -> torch.Tensor:
    """Return this rank's rows of the global batch."""
    ids = torch.randint(31, (ROWS, 6), generator=torch.Generator().manual_seed(100 * step + micro))
    rank, world = rank_and_world()
    return ids.chunk(world)[rank]


def loss_of(model: Any, ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    logits = model(ids[:, :-1], **kwargs).float()
    return nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def make(
    seed: int = 0, optimizer: Any = torch.optim.AdamW, **config: Any
) -> tuple[Net, Any, oe.OffloadEngine]:
    torch.manual_seed(seed)
    model = Net()
    adam = {"eps": 1e-5} if optimizer is torch.optim.AdamW else {}
    made = optimizer(model.parameters(), lr=1e-2, **adam)
    settings = {"device": "emulated", "bucket_bytes": 1, **config}
    return model, made, oe.OffloadEngine(model, made, oe.EngineConfig(**settings))


def result(model: Net, engine: oe.OffloadEngine, seen: list[Any]) -> dict[str, Any]:
    with engine.full_parameters() as values:
        masters = {name: value.clone() for name, value in values.items()}
    states = {
        f"{name}.{key}": value.clone()
        for name, param in model.named_parameters()
        for key, value in engine.optimizer.state.get(param, {}).items()
    }
    engine.close()
    return {"masters": masters, "states": states, "seen": seen}


def train(variant: str = "", **config: Any) -> dict[str, Any]:
    """Train on this rank's share; ranks start from different values, of which rank 0's count."""
    rank, world = rank_and_world()
    kind = torch.optim.SGD if variant == "sgd" else torch.optim.AdamW
    model, optimizer, engine = make(seed=rank, optimizer=kind, **config)
    seen: list[Any] = []
    for step in range(STEPS):
        micro_batches = 3 if "accumulated" in variant else 1
        if "train_batch" in variant:
            micro_batches = 3
            order: Any = "layer_major" if "layer" in variant else "micro_batch"
            batches = [mine(step, micro) for micro in range(micro_batches)]
            engine.train_batch(
                [ids[:, :-1] for ids in batches],
                functools.partial(_share, batches, micro_batches),
                order=order,
            )
        for micro in range(0 if "train_batch" in variant else micro_batches):
            last = micro == micro_batches - 1
            quiet = engine.no_sync() if "no_sync" in variant and not last else contextlib.nullcontext()
            with quiet:
                engine.backward(loss_of(engine, mine(step, micro)) / micro_batches)
        grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        if variant == "torch clip":
            seen.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
        elif config.get("precision") != "fp16":
            seen.append(engine.grad_norm)
        engine.step()
        engine.zero_grad()
        seen.append(grads)
    return result(model, engine, seen)


@functools.cache
def alone(variant: str, config: tuple[tuple[str, Any], ...]) -> dict[str, Any]:
    return train(variant, **dict(config))


def compare(found: list[dict[str, Any]], expected: dict[str, Any], grads: float, values: float) -> int:
    """Check bits between ranks, and distances to one process; return how many tensors were compared."""
    compared = 0
    for other in found[1:]:
        for part in ("masters", "states"):
            assert all(torch.equal(value, other[part][name]) for name, value in found[0][part].items())
        for mine_seen, theirs in zip(found[0]["seen"], other["seen"], strict=True):
            if isinstance(mine_seen, dict):
                assert all(torch.equal(value, theirs[name]) for name, value in mine_seen.items())
            else:
                assert mine_seen == theirs
    first = found[0]
    for ours, theirs in zip(first["seen"], expected["seen"], strict=True):
        if not isinstance(ours, dict):
            assert ours == pytest.approx(theirs, rel=max(grads, 1e-5))
            continue
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            assert (ours[name] - value).abs().max() <= grads * value.abs().max(), name
            compared += 1
    for name, value in expected["masters"].items():
        assert (first["masters"][name] - value).abs().max() <= values, name
        compared += 1
    assert first["states"].keys() == expected["states"].keys()
    return compared


def _share(
    batches: list[torch.Tensor], count: int, logits: torch.Tensor, inputs: torch.Tensor
) -> torch.Tensor:
    (ids,) = [each for each in batches if torch.equal(each[:, :-1], inputs)]
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten()) / count


CASES: list[tuple[str, dict[str, Any]]] = [
    ("", {}),
    ("accumulated", {}),
    ("accumulated no_sync", {}),
    ("", {"max_grad_norm": 0.1}),
    ("torch clip", {}),
    ("train_batch", {}),
    ("sgd", {"device_share": 0.5}),
    ("", {"update_timing": "serial", "keep_resident": True}),
    ("accumulated", {"accumulation": "device"}),
]


@pytest.mark.parametrize(("variant", "config"), CASES, ids=str)
@pytest.mark.parametrize(
    "world", [2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)]
)
def test_replicas_give_the_numbers_of_one_process(world: int, variant: str, config: dict[str, Any]) -> None:
    found = on_ranks(world, functools.partial(train, variant, **config))
    expected = alone(variant, tuple(config.items()))
    # Six of the seven trained parameters have a gradient each step: 'extra' is not used, 'head' is the embedding.
    assert compare(found, expected, 2e-6, 1e-4) == STEPS * 5 + len(expected["masters"])


@pytest.mark.parametrize("variant", ["", "accumulated", "accumulated no_sync"])
@pytest.mark.parametrize(
    "config",
    [
        {"precision": "bf16"},
        {"precision": "bf16", "master_layout": "split", "moments_layout": "int8", "max_grad_norm": 0.1},
        {"precision": "fp16", "max_grad_norm": 0.1},
    ],
    ids=str,
)
def test_replicas_in_half_precision_are_the_same_bits_on_all_ranks(
    variant: str, config: dict[str, Any]
) -> None:
    """Against one process only roughly: a batch in two halves is rounded otherwise."""
    found = on_ranks(2, functools.partial(train, variant, **config))
    compare(found, alone(variant, tuple(config.items())), 0.1, 0.05)


def _delay_updates_of(engine: oe.OffloadEngine, param: nn.Parameter) -> None:
    lane: Any = engine._updates._lane
    (bucket,) = [each for each in engine._buckets if any(entry.param is param for entry in each.entries)]

    class Late:
        def __getattr__(self, name: str) -> Any:
            return getattr(lane, name)

        def update(self, rule: Any, master: torch.Tensor, *args: Any, rank: int) -> Any:
            *others, after = args
            if master.data_ptr() == bucket.working.data_ptr():
                start = kernels.load().Event.manual()
                threading.Timer(1.0, lambda: start.signal(0, 0)).start()
                after = [*after, start]
            return lane.update(rule, master, *others, after, rank=rank)

    engine._updates._lane = Late()  # type: ignore[assignment]


def _uneven(late: bool = False) -> dict[str, Any]:
    """Rank 1 alone uses `extra`, and has no rows for `down`.

    Args:
        late: on rank 1, the updates of `down` start after the next backward, if nobody waits for them.
    """
    rank, world = rank_and_world()
    model, _, engine = make(lookahead_bytes=1)  # what is fetched ahead waits for its update, too
    if late and rank == 1:
        _delay_updates_of(engine, model.down.weight)
    seen: list[Any] = []
    for step in range(3):
        total = torch.zeros(())
        for part in range(2):
            if world == 1 or part == rank:
                ids = torch.randint(31, (4, 6), generator=torch.Generator().manual_seed(10 * step + part))
                total = total + loss_of(engine, ids, extra=part == 1)
        engine.backward(total / (2 if world == 1 else 1))
        seen.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
        engine.step()
        engine.zero_grad()
    return result(model, engine, seen)


def test_a_gradient_on_one_rank_is_a_mean_with_zeros_on_all() -> None:
    found = on_ranks(2, _uneven)
    assert compare(found, _uneven(), 2e-6, 1e-4) > 0
    assert "extra.weight" in found[0]["seen"][0] and "down.weight" in found[1]["seen"][0]


def test_a_mean_waits_for_the_update_that_reads_the_last_one() -> None:
    """On a rank that does not use a parameter nothing else has waited for its update when the next mean is made."""
    expected = on_ranks(2, _uneven)
    found = on_ranks(2, functools.partial(_uneven, late=True))
    for rank in range(2):
        for name, value in expected[rank]["masters"].items():
            assert torch.equal(found[rank]["masters"][name], value), name


def _against_ddp(ours: bool) -> list[torch.Tensor]:
    rank, _ = rank_and_world()
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 2))
    if ours:
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        engine: Any = oe.OffloadEngine(model, optimizer, oe.EngineConfig(device="emulated"))
    else:
        engine = nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        for micro in range(2):
            data = torch.randn(
                3, 6, generator=torch.Generator().manual_seed(7 * step + 3 * micro + 100 * rank)
            )
            with engine.no_sync() if micro == 0 else contextlib.nullcontext():
                engine(data).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if ours:
        engine.close()
    return [param.detach().clone() for param in model.parameters()]


def test_a_loop_written_for_ddp_runs_unchanged() -> None:
    theirs, ours = (
        on_ranks(2, functools.partial(_against_ddp, False)),
        on_ranks(2, functools.partial(_against_ddp, True)),
    )
    for rank in range(2):
        for expected, found in zip(theirs[0], ours[rank], strict=True):
            torch.testing.assert_close(found, expected, rtol=2e-6, atol=1e-7)


def _saved(path: str, apart: bool) -> Any:
    rank, _ = rank_and_world()
    model, _, engine = make()
    engine.backward(loss_of(engine, mine(0)))
    engine.step()
    if apart and rank == 1:
        with torch.no_grad():
            model.up.weight.add_(1)
    try:
        engine.save(path, extra={"rank": rank})
        engine.zero_grad()
        engine.backward(loss_of(engine, mine(1)))
        engine.step()
        extra = engine.load(path)
        again = result(model, engine, [])
        return extra, again["masters"]
    except oe.StateError as error:
        engine.close()
        return str(error)


def test_one_rank_writes_the_checkpoint_and_all_read_it(tmp_path: Path) -> None:
    found = on_ranks(2, _saved, str(tmp_path / "c"), False)
    assert [extra for extra, _ in found] == [{"rank": 0}] * 2
    assert all(torch.equal(value, found[1][1][name]) for name, value in found[0][1].items())
    # A run with another number of ranks goes on from it.
    model, _, engine = make()
    engine.load(tmp_path / "c")
    assert all(
        torch.equal(value, found[0][1][name]) for name, value in result(model, engine, [])["masters"].items()
    )


def test_replicas_that_have_come_apart_are_not_saved(tmp_path: Path) -> None:
    for message in on_ranks(2, _saved, str(tmp_path / "c"), True):
        assert "come apart: 1 of 2 ranks have other values than rank 0 in bucket" in message
    assert not (tmp_path / "c").exists()


def _unfrozen() -> dict[str, Any]:
    model, _, engine = make(seed=rank_and_world()[0])
    for step in range(4):
        if step == 2:
            model.frozen.requires_grad_(True)
        engine.backward(loss_of(engine, mine(step)))
        engine.step()
        engine.zero_grad()
    return result(model, engine, [])


def test_parameters_are_unfrozen_on_all_ranks() -> None:
    assert compare(on_ranks(2, _unfrozen), _unfrozen(), 2e-6, 1e-4) > 0


# What is refused.


def _refused(config: dict[str, Any]) -> str:
    try:
        make(**config)[2].close()
    except oe.ConfigError as error:
        return str(error)
    return ""


def _differing(what: str) -> str:
    rank, _ = rank_and_world()
    try:
        if what == "bucket_bytes":
            make(bucket_bytes=1 + rank)[2].close()
        elif what == "budget":
            torch.manual_seed(0)
            model = nn.Sequential(*(nn.Linear(200, 200) for _ in range(8)))
            config = oe.EngineConfig(device="emulated", device_memory=("4MiB", "64MiB")[rank])
            oe.OffloadEngine(model, torch.optim.AdamW(model.parameters()), config).close()
        elif what == "model":
            model = nn.Sequential(nn.Linear(5 + rank, 3))
            oe.OffloadEngine(
                model, torch.optim.AdamW(model.parameters()), oe.EngineConfig(device="emulated")
            ).close()
        else:
            model = nn.Sequential(nn.Linear(5, 3))
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * (1 + rank))
            oe.OffloadEngine(model, optimizer, oe.EngineConfig(device="emulated")).close()
    except oe.ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("bucket_bytes", "the ranks differ: bucket_bytes is 1 on rank 0 and 2 on rank 1"),
        ("budget", "the ranks differ: device_memory is 4194304 on rank 0 and 67108864 on rank 1"),
        ("model", "the ranks differ: the parameters is"),
        ("lr", "the ranks differ: the optimizer's settings is"),
    ],
)
def test_ranks_that_differ_are_refused_on_both(what: str, words: str) -> None:
    for message in on_ranks(2, _differing, what):
        assert words in message


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            {"gradients": "release"},
            "gradients = 'release' updates parameters before the gradients of other ranks",
        ),
        ({"update_timing": "during_backward"}, "use update_timing = 'under_forward'"),
        ({"parallel": ParallelConfig(tp=2)}, "the engine has replicas so far"),
        ({"parallel": ParallelConfig(zero_stage=2)}, "the engine has replicas so far"),
        ({"parallel": ParallelConfig(dp=4)}, "dp = 4 is not possible with 2 ranks"),
    ],
    ids=str,
)
def test_what_several_ranks_cannot_do_yet(config: dict[str, Any], words: str) -> None:
    for message in on_ranks(2, _refused, config):
        assert words in message


def test_a_layout_of_several_ranks_needs_them() -> None:
    assert "dp = 2 is not possible with 1 ranks" in _refused({"parallel": ParallelConfig(dp=2)})


def _sharing(several: bool) -> str:
    """The device is a stand-in: what is compared is where it says that it is."""
    watchdog = watchdog_of()
    group = host_group("devices", watchdog)
    replicas = Replicas.__new__(Replicas)
    replicas.rank = group.rank
    index = group.rank if several else 0
    try:
        replicas._check_device(group, types.SimpleNamespace(torch_device=torch.device("cuda", index)))  # type: ignore[arg-type]
    except oe.ConfigError as error:
        return str(error)
    finally:
        watchdog.close()
    return ""


def test_ranks_on_one_device_are_told_how_to_part() -> None:
    assert on_ranks(2, _sharing, True) == ["", ""]
    for message in on_ranks(2, _sharing, False):
        assert "are both on cuda:0 of this machine" in message and "LOCAL_RANK" in message


def _raising() -> None:
    rank, _ = rank_and_world()
    _, _, engine = make()
    for step in range(3):
        loss = loss_of(engine, mine(step))
        if rank == 1 and step == 1:
            raise ValueError("the data of rank 1 are bad")
        engine.backward(loss)
        engine.step()


def test_an_error_on_one_rank_ends_the_run() -> None:
    with pytest.raises(RankFailedError, match="the data of rank 1 are bad"):
        on_ranks(2, _raising)
