"""The update benchmark at toy sizes: its rows are whole and consistent; speed itself is not judged here."""

from __future__ import annotations

import json

import pytest
import torch

from offload_engine.bench import update

KEYS = {
    "rule", "layout", "grad_dtype", "threads", "numel", "gparams_per_s", "gb_per_s", "ceiling_gb_per_s",
    "share_of_ceiling", "over_torch_fused",
}  # fmt: skip


def test_json_rows(capsys):
    threads = torch.get_num_threads()
    assert update.main(["--json", "--numel", "200k", "100k", "--threads", "1", "2", "--rounds", "1"]) == 0
    rows = json.loads(capsys.readouterr().out)
    cases = {(row["threads"], row["numel"], row["layout"], row["grad_dtype"]) for row in rows}
    assert cases == {
        (count, numel, *layout)
        for count in (1, 2)
        for numel in (200_000, 100_000)
        for layout in (("mixed", "bfloat16"), ("fp32", "float32"))
    }
    for row in rows:
        assert set(row) >= KEYS and row["rule"] == "adamw"
        assert row["gb_per_s"] == pytest.approx(28 * row["gparams_per_s"])
        assert row["share_of_ceiling"] == pytest.approx(row["gb_per_s"] / row["ceiling_gb_per_s"])
        assert row["over_torch_fused"] == pytest.approx(row["gparams_per_s"] / row["torch_gparams_per_s"])
        assert "copy_(master)" in row["torch_job"] or row["layout"] == "fp32"
    assert torch.get_num_threads() == threads


def test_table_says_what_it_compares_with(capsys):
    update.main(
        ["--numel", "100k", "--threads", "1", "--rounds", "1", "--layout", "mixed", "--isa", "scalar"]
    )
    text = capsys.readouterr().out
    assert "native (scalar)" in text and "mixed: torch's side is gradient.float()" in text


@pytest.mark.parametrize("bad", ["0", "-5", "many"])
def test_sizes_must_be_numbers(bad, capsys):
    with pytest.raises(SystemExit):
        update.main(["--numel", bad])
    assert "numel" in capsys.readouterr().err


def test_the_bytes_loop_touches_every_array():
    """A ceiling that skipped a stream would flatter nobody but the ceiling."""
    from offload_engine import kernels

    lane = kernels.load().Lane("bench")
    for numel in (70, 300_001):
        for prefetch in (False, True):
            p, m, v, g = (torch.full((numel,), value) for value in (1.0, 2.0, 3.0, 0.5))
            w = torch.zeros(numel, dtype=torch.bfloat16)
            segment = kernels.UpdateSegment(0, numel, 1e-3, 0.9, 0.999, 1e-8, 0.0, 1, True, False)
            lane.update_bytes("adam", p, (m, v), g, w, [segment], 2.0, prefetch=prefetch).wait()
            for tensor, value in ((p, 2.0), (m, 2.5), (v, 3.5), (w, 2.0), (g, 0.5)):
                assert tensor.eq(value).all()
    lane.close()
