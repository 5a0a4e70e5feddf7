"""A checkpoint of any parallel layout, in every other layout: bit for bit, on real ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from landfall.testing.procs import RanksFailed, run_ranks
from tests.interop.layouts import (
    LAYOUTS,
    Layout,
    exported_files,
    load_each,
    load_stock_state,
    put_together,
    stock_loads,
    stock_saves,
    stock_trains,
    train_and_save,
)

Save = Callable[[Layout, bool], tuple[str, list[float]]]
QUICK = ("TP2+SP", "TP2xPP2", "PP2xDP2")
PARALLEL = [layout for layout in LAYOUTS.values() if layout.num_ranks > 1]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Save:
    """``saved(layout, tied)``: the folder that the layout saved, and its losses after that."""

    @cache
    def save(layout: Layout, tied: bool) -> tuple[str, list[float]]:
        folder = tmp_path_factory.mktemp("layouts") / f"{layout.name}-{tied}"
        ranks = run_ranks(train_and_save, layout.num_ranks, layout, str(folder), tied)
        torch.save(put_together(ranks), folder / "state.pt")
        return str(folder), ranks[0].next_losses

    return save


def check(target: Layout, sources: list[Layout], tied: bool, saved: Save, tmp_path: Path) -> None:
    losses = {source.name: saved(source, tied)[1] for source in sources}
    folders = {source.name: saved(source, tied)[0] for source in sources}
    export = tmp_path / "export"
    ranks = run_ranks(load_each, target.num_ranks, target, folders, tied, str(export), timeout_s=240)
    for rank in ranks:
        for name, found in rank.items():
            assert not found.different, (name, found.different[:5])
            assert found.next_losses == pytest.approx(losses[name][:1], abs=1e-5), name
            assert 0 < found.num_bytes_read <= found.num_bytes_touched
    assert exported_files(export) == exported_files(folders[sources[0].name])
    assert len(exported_files(export)) > 3


@pytest.mark.parametrize("name", QUICK)
def test_checkpoint_of_another_layout_is_loaded_bit_for_bit(name: str, saved: Save, tmp_path: Path) -> None:
    others = [LAYOUTS["1"], *(LAYOUTS[other] for other in QUICK if other != name)]
    check(LAYOUTS[name], others, True, saved, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_loads_every_other_bit_for_bit(
    name: str, tied: bool, saved: Save, tmp_path: Path
) -> None:
    check(LAYOUTS[name], list(LAYOUTS.values()), tied, saved, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("layout", PARALLEL, ids=[layout.name for layout in PARALLEL])
def test_stock_megatron_core_loads_what_every_layout_saved(layout: Layout, saved: Save) -> None:
    folder, _ = saved(layout, True)
    for different in run_ranks(stock_loads, layout.num_ranks, layout, folder, True):
        assert not different, different[:5]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fully_reshardable", "dp_reshardable"])
@pytest.mark.parametrize("name", ["DP2", "TP2", "PP2", "TP2xPP2"])
def test_stock_checkpoint_of_a_layout_is_loaded_bit_for_bit(name: str, kind: str, tmp_path: Path) -> None:
    layout, folder = LAYOUTS[name], str(tmp_path / "stock")
    for different in run_ranks(stock_saves, layout.num_ranks, layout, folder, True, kind, timeout_s=240):
        assert not different, different[:5]


@pytest.mark.slow
def test_stock_buckets_are_loaded_by_other_data_parallel_sizes_only(tmp_path: Path) -> None:
    folder = str(tmp_path / "stock")
    truth = run_ranks(stock_trains, 2, LAYOUTS["DP2"], folder, timeout_s=240)
    torch.save(put_together(truth), Path(folder, "state.pt"))
    for name in ("1", "DP4"):
        for different in run_ranks(load_stock_state, LAYOUTS[name].num_ranks, LAYOUTS[name], folder):
            assert not different, different[:5]
    with pytest.raises(RanksFailed, match="saved as dp_reshardable in another layout"):
        run_ranks(load_stock_state, 2, LAYOUTS["TP2"], folder)
