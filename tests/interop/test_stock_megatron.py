"""Interchange with stock megatron-core, bit for bit in both directions, over real ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from landfall.adapters.megatron_core import describe
from landfall.engine.checkpoint import Checkpoint
from landfall.engine.stock import StockCheckpoint
from landfall.store.local import LocalStore
from landfall.testing.procs import run_ranks
from tests.interop import job as jobs


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    different = [name for name in expected if not torch.equal(found[name], expected[name])]
    assert not different, different[:5]


def ours_to_stock(folder: str, bf16: bool) -> None:
    trained = jobs.start(bf16)
    trained.train(0, 3)
    jobs.save_ours(trained, Path(folder), step=3)
    expected = trained.state()
    after = trained.train(3, 5)
    fresh = jobs.start(bf16, seed=4, session=trained.session)
    assert jobs.load_stock(fresh, Path(folder)) == 3
    assert_same(fresh.state(), expected)
    assert fresh.train(3, 5) == after


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_our_checkpoint_is_loaded_by_stock_megatron_core_bit_for_bit(tmp_path: Path, bf16: bool) -> None:
    run_ranks(ours_to_stock, 2, str(tmp_path / "ours"), bf16)


def save_ours_on(folder: str, bf16: bool) -> dict[str, torch.Tensor]:
    trained = jobs.start(bf16)
    trained.train(0, 3)
    jobs.save_ours(trained, Path(folder), step=3)
    trained.session.coordinator.close()
    return {name: p.detach().clone() for name, p in trained.model.named_parameters()}


def load_stock_on(folder: str, bf16: bool) -> dict[str, torch.Tensor]:
    fresh = jobs.start(bf16, seed=4)
    jobs.load_stock(fresh, Path(folder))
    return {name: p.detach().clone() for name, p in fresh.model.named_parameters()}


@pytest.mark.parametrize(("writers", "readers"), [(2, 1), (1, 2), (3, 2)])
def test_our_checkpoint_is_resharded_by_stock_megatron_core(
    tmp_path: Path, writers: int, readers: int
) -> None:
    folder = str(tmp_path / "ours")
    saved = run_ranks(save_ours_on_any, writers, folder)
    for found in run_ranks(load_stock_on, readers, folder, False):
        assert_same(found, saved[0])


def save_ours_on_any(folder: str) -> dict[str, torch.Tensor]:
    """Without training: the rows of a step need not divide by the ranks."""
    job = jobs.start(bf16=False)
    jobs.save_ours(job, Path(folder), step=3)
    job.session.coordinator.close()
    return {name: p.detach().clone() for name, p in job.model.named_parameters()}


def stock_to_ours(folder: str, bf16: bool) -> None:
    trained = jobs.start(bf16)
    trained.train(0, 3)
    jobs.save_stock(trained, Path(folder))
    expected = trained.state()
    fresh = jobs.start(bf16, seed=4, session=trained.session)
    jobs.load_ours(fresh, StockCheckpoint(LocalStore(folder)))
    assert_same(fresh.state(), expected)


@pytest.mark.slow
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_stock_checkpoint_is_loaded_by_us_bit_for_bit(tmp_path: Path, bf16: bool) -> None:
    run_ranks(stock_to_ours, 2, str(tmp_path / "stock"), bf16, timeout_s=240)


def test_our_checkpoint_is_loaded_by_plain_torch_dcp(tmp_path: Path) -> None:
    folder = tmp_path / "ours"
    run_ranks(save_ours_on, 2, str(folder), False)
    checkpoint = Checkpoint(LocalStore(folder))
    records = checkpoint.tensors("torch_dist")
    found = {key: torch.zeros(group[0].global_shape) for key, group in records.items()}
    dcp.load(found, checkpoint_id=folder, no_dist=True)
    again = {key: torch.zeros(group[0].global_shape) for key, group in records.items()}
    from landfall.engine.load import load
    from landfall.format.shards import Shard, whole

    load(
        [Shard(k, tuple(t.shape), whole(tuple(t.shape)), t, (0,)) for k, t in again.items()],
        checkpoint,
        "torch_dist",
    )
    assert_same(found, again)
    assert any(key.startswith(describe.OPTIMIZER_PREFIX) and t.any() for key, t in found.items())


def reshard_ours(folder: str, saved_state: str) -> None:
    fresh = jobs.start(bf16=False, seed=4)
    jobs.load_ours(fresh, Checkpoint(LocalStore(folder)))
    # The next steps are those of the run that saved, whatever the number of ranks.
    losses = fresh.train(3, 5)
    expected = torch.load(saved_state)
    assert losses == pytest.approx(expected, abs=1e-5)


def save_and_go_on(folder: str, saved_state: str) -> None:
    trained = jobs.start(bf16=False)
    trained.train(0, 3)
    jobs.save_ours(trained, Path(folder), step=3)
    losses = trained.train(3, 5)
    if dist.get_rank() == 0:
        torch.save(losses, saved_state)
    trained.session.coordinator.close()


@pytest.mark.case("b02")
@pytest.mark.parametrize("readers", [1, 4])
def test_optimizer_saved_on_two_ranks_goes_on_with_other_numbers_of_ranks(
    tmp_path: Path, readers: int
) -> None:
    folder, losses = str(tmp_path / "ours"), str(tmp_path / "losses.pt")
    run_ranks(save_and_go_on, 2, folder, losses)
    run_ranks(reshard_ours, readers, folder, losses)
