"""A core that another process takes costs a chunk of the update, not its whole time."""

from __future__ import annotations

import pytest

from offload_engine import kernels
from offload_engine.bench.update_cases import measure_busy
from offload_engine.host import usable_cores

pytestmark = pytest.mark.slow


@pytest.mark.skipif(usable_cores() < 2, reason="needs a core to lose and one to keep")
def test_an_update_of_a_million_parameters_beside_a_busy_core() -> None:
    """At most 2.5 times as long, in turns with the same update without; the interval leaves room for noise."""
    backend = kernels.load()
    pool = backend.WorkerPool(usable_cores())
    lane = backend.Lane("busy", pool=pool)
    row = measure_busy(lane, backend.isa, pool.threads, 15, [], numel=1_000_000)
    lane.close(), pool.close()
    assert row.over_quiet_interval[0] <= 2.5, row
    assert row.quiet_ms > 0
