"""Cost model: context, correction by rounds that ran, and the cache file."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import Tensor

from draftwood.attention import Batch
from draftwood.engine import costs
from draftwood.engine.costs import CostModel
from draftwood.kv import BlockPool, Plane
from draftwood.tree.shape import CostTable
from tests.tiny import hf_model

NEAR = CostTable((1, 4), (1.0, 2.0))
FAR = CostTable((1, 4), (2.0, 6.0))


def test_cost_grows_with_context() -> None:
    model = CostModel(NEAR, FAR, 1000)
    assert model.at(0)(4) == 2.0
    assert model.at(500)(4) == 4.0
    assert model.at(2000)(1) == 3.0


def test_a_slower_machine_moves_the_pace_not_the_shape() -> None:
    model = CostModel(NEAR, NEAR, 0)
    for _ in range(200):
        for rows in (1, 4):
            model.observe(rows, 0, 3 * NEAR(rows))
    assert model.at(0)(1) == pytest.approx(3.0, rel=0.1)
    assert model.at(0)(4) / model.at(0)(1) == pytest.approx(2.0, rel=0.05)


def test_a_slower_machine_makes_no_single_size_dear() -> None:
    """Where load is steady one size is all that is seen: the others are as much slower."""
    model = CostModel(NEAR, NEAR, 0)
    for _ in range(200):
        model.observe(1, 0, 3 * NEAR(1))
        assert model.at(0)(4) / model.at(0)(1) == pytest.approx(2.0, rel=0.02)
    assert model.at(0)(4) == pytest.approx(6.0, rel=0.05)


def test_what_was_learned_of_a_size_is_kept_while_another_runs() -> None:
    model = CostModel(NEAR, NEAR, 0)
    for _ in range(200):
        model.observe(1, 0, 1.0)
        model.observe(4, 0, 4.0)
    assert model.at(0)(4) / model.at(0)(1) == pytest.approx(4.0, rel=0.1)
    for _ in range(500):
        model.observe(1, 0, 1.0)
    assert model.at(0)(4) / model.at(0)(1) == pytest.approx(4.0, rel=0.1)


def test_one_wrong_reading_is_corrected() -> None:
    """A size measured while another program ran would be shunned for ever."""
    model = CostModel(CostTable((1, 2, 4), (1.0, 1.9, 2.0)), NEAR, 0)
    for _ in range(300):
        model.observe(1, 0, 1.0)
        model.observe(2, 0, 1.2)
        model.observe(4, 0, 2.0)
    assert model.at(0)(2) / model.at(0)(1) < 1.6


def test_measured_cost_never_falls_with_rows() -> None:
    times = {1: 1.0, 2: 0.9, 4: 3.0}
    table = costs._table(times.__getitem__, (1, 2, 4), 100, room=100)
    assert table == CostTable((1, 2, 4), (0.9, 0.9, 3.0))


def test_a_table_that_was_cut_short_does_not_promise_cheap_rows() -> None:
    """Continued by its last slope, a busy start made the controller verify 25 nodes at a time."""
    times = {1: 1.0, 2: 1.0, 4: 1.01}
    short = costs._table(times.__getitem__, (1, 4, 2), 2.5, room=100)
    assert short == CostTable((1, 4), (1.0, 1.01))
    short = costs._table(times.__getitem__, (1, 2, 4), 1.5, room=100)
    assert short == CostTable((1, 2), (1.0, 2.0))
    assert costs._table(times.__getitem__, (1, 2, 4), 100, room=2) == CostTable(
        (1, 2, 4), (1.0, 1.0, 2.0)
    )


def test_what_one_size_taught_holds_for_its_neighbours() -> None:
    model = CostModel(CostTable((1, 8, 16), (1.0, 1.0, 1.0)), NEAR, 0)
    for _ in range(200):
        model.observe(1, 0, 1.0)
        model.observe(12, 0, 2.0)
    assert model.at(0)(13) / model.at(0)(1) > 1.6


def test_the_cache_file_round_trips_and_rubbish_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "costs" / "x.json"
    assert costs._read(path) is None
    costs._write(path, CostModel(NEAR, FAR, 1000))
    assert costs._read(path) == CostModel(NEAR, FAR, 1000)
    path.write_text('{"near": 3}')
    assert costs._read(path) is None


def test_both_models_of_a_pair_are_measured_and_cached_by_their_own_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft model's forwards write to its own plane, and a second start measures nothing."""
    target, draft = hf_model("llama"), hf_model("llama", seed=50)
    pool = BlockPool(target.spec.kv, draft.spec.kv, num_blocks=20, block_size=16)
    planes = []

    class Watched:
        spec = draft.spec

        def forward(self, batch: Batch, plane: Plane) -> Tensor:
            planes.append(plane)
            return draft.forward(batch, plane)

    monkeypatch.setattr(costs, "cache_dir", lambda: tmp_path)
    assert costs._path(target) != costs._path(draft)
    first = costs.cost_model(Watched(), pool, draft=True)
    assert planes
    assert all(plane is pool.draft for plane in planes)
    assert pool.num_free == pool.num_blocks
    planes.clear()
    assert costs.cost_model(Watched(), pool, draft=True) == first
    assert not planes
    costs.cost_model(target, pool)
    assert len(list((tmp_path / "costs").iterdir())) == 2


def test_measuring_ends_when_its_time_is_up() -> None:
    """A forward that takes long is timed once, and larger ones are left out."""
    spent: list[int] = []

    def forward(rows: int) -> float:
        spent.append(rows)
        return float(rows)

    costs._table(forward, (1, 16, 4, 64), 10.0, room=100)
    assert spent == [1, 1, 1, 16]
