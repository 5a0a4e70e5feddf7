"""Errors in the middle of a save, on one rank of several: all know at once, and nothing is lost."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from landfall.engine.latest import newest
from landfall.engine.protocol import Step
from landfall.engine.save import save
from landfall.engine.session import solo_session
from landfall.errors import RanksMissingError, SaveError
from landfall.store.local import LocalStore
from landfall.testing.faults import FaultyStore, kill_at_step
from landfall.testing.procs import run_ranks, start_ranks

from .job import contents_of, leftovers, start_session, value_in

ERRORS = ("EDQUOT", "EIO", "EROFS", "EACCES", "EFBIG")
ONE_AT_ONCE = ["ENOSPC", *(pytest.param(name, marks=pytest.mark.slow) for name in ERRORS)]


def fail_at_every_operation(folder: str, name: str) -> int:
    """Rank 1's operations fail from the n-th on, for every n, in one save after the other."""
    session, place = start_session(), LocalStore(Path(folder))
    save(contents_of(1.0, session.rank, 2), place, session, step=1)
    first = 0
    while True:
        first += 1
        store = FaultyStore(place, getattr(errno, name), first) if session.rank else place
        dist.barrier()
        started = time.monotonic()
        try:
            save(contents_of(2.0, session.rank, 2), store, session, step=2)
            break
        except SaveError as error:
            text = str(error)
        assert time.monotonic() - started < 5
        assert "rank 1, step 2" in text and name in text and "bytes free there" in text and folder in text
        dist.barrier()
        if session.rank == 0:
            assert value_in(Path(folder)) == 1.0
            assert not leftovers(Path(folder))
        dist.barrier()
    session.coordinator.close()
    return first - 1


@pytest.mark.parametrize("name", ONE_AT_ONCE)
def test_error_at_any_operation_of_one_rank_is_told_by_all_and_undone(tmp_path: Path, name: str) -> None:
    numbers = run_ranks(fail_at_every_operation, 2, str(tmp_path), name)
    assert numbers[0] == numbers[1] >= 5
    assert value_in(tmp_path) == 2.0


@pytest.mark.parametrize("name", ONE_AT_ONCE)
def test_error_at_any_operation_of_the_committing_rank_keeps_the_checkpoint_before(
    tmp_path: Path, name: str
) -> None:
    session, place = solo_session(), LocalStore(tmp_path)
    save(contents_of(1.0), place, session, step=1)
    for first in range(1, 200):
        store = FaultyStore(place, getattr(errno, name), first, last=first)
        try:
            save(contents_of(2.0), store, session, step=1)
        except SaveError as error:
            assert name in str(error)
        if store.num_operations < first:
            break
        value = value_in(tmp_path)
        if value == 2.0:  # the error came after the commit
            save(contents_of(1.0), place, session, step=1)
        assert value_in(tmp_path) == 1.0
    else:
        pytest.fail("a save has fewer operations")
    assert value_in(tmp_path) == 2.0 and not leftovers(tmp_path)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB that is really full when it is."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("only root can mount")
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip(f"mount: {mounted.stderr.decode()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.case("a06")
def test_full_disk_is_refused_with_the_figures_or_told_when_it_fills(small_disk: Path) -> None:
    session, store = solo_session(), LocalStore(small_disk / "checkpoint-1")
    with pytest.raises(SaveError, match=r"ENOSPC(.|\n)*bytes are needed, [\d,]+ are free"):
        save(contents_of(1.0, num_files=60), store, session, step=1)
    assert not list(store.list())
    (small_disk / "other").write_bytes(bytes(24 << 10))
    with pytest.raises(SaveError, match=r"ENOSPC(.|\n)*bytes free there"):  # by its many files, not its bytes
        save(contents_of(1.0, num_files=8), store, session, step=1)
    assert not list(store.list())
    (small_disk / "other").unlink()
    save(contents_of(1.0), store, session, step=1)
    assert value_in(small_disk / "checkpoint-1") == 1.0


def save_with_a_file_size_limit(folder: str) -> list[str]:
    told = []
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for when in (Step.BEGUN, Step.WRITTEN):  # before the check, and after it

        def limit() -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (256, hard))

        kill_at_step(when, act=limit)
        with pytest.raises(SaveError) as caught:
            save(contents_of(1.0), LocalStore(folder), solo_session(), step=1)
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        told.append(str(caught.value))
    save(contents_of(2.0), LocalStore(folder), solo_session(), step=1)
    return told


@pytest.mark.case("a06")
def test_file_size_limit_is_refused_with_the_figures_or_told_when_it_is_met(tmp_path: Path) -> None:
    [[refused, met]] = run_ranks(save_with_a_file_size_limit, 1, str(tmp_path))
    assert "EFBIG" in refused and "may write files of 256 bytes, and this one needs" in refused
    assert "EFBIG" in met and "bytes free there" in met
    assert value_in(tmp_path) == 2.0


def save_beside_a_stopped_rank(folder: str, sleep_s: float) -> tuple[str, float]:
    session, store = start_session(), LocalStore(folder)
    save(contents_of(1.0, session.rank, 3), store, session, step=1)
    dist.barrier()
    session.deadline_s = 2.0
    started = time.monotonic()
    if session.rank == 2:
        stop = (lambda: os.kill(os.getpid(), 19)) if not sleep_s else (lambda: time.sleep(sleep_s))
        kill_at_step(Step.WRITTEN, act=stop)
    try:
        save(contents_of(2.0, session.rank, 3), store, session, step=2)
        text = ""
    except RanksMissingError as error:
        assert error.missing == (2,)
        text = str(error)
    took_s = time.monotonic() - started
    session.coordinator.close(1.0)
    return text, took_s


def test_stopped_rank_is_named_by_the_others_within_the_deadline(tmp_path: Path) -> None:
    with start_ranks(save_beside_a_stopped_rank, 3, str(tmp_path), 0.0) as ranks:
        for rank in (0, 1):
            ranks.processes[rank].join(20)
            text, took_s = ranks.result(rank)
            assert "rank 2" in text and "last seen: rank 2: " in text, text
            assert took_s < 6
    assert value_in(tmp_path) == 1.0
    assert newest(tmp_path).step == 1


class SlowStore(FaultyStore):
    """Takes longer than the deadline in all, but not for one write."""

    def __init__(self, store: LocalStore) -> None:
        super().__init__(store, errno.EIO, 1 << 60)

    def check(self, name: str) -> None:
        super().check(name)
        time.sleep(0.25)


def save_slowly(folder: str) -> float:
    session = start_session()
    dist.barrier()
    session.deadline_s = 1.0
    store = SlowStore(LocalStore(folder)) if session.rank == 1 else LocalStore(folder)
    started = time.monotonic()
    save(contents_of(1.0, session.rank, 2, num_files=6), store, session, step=1)
    took_s = time.monotonic() - started
    session.coordinator.close()
    return took_s


def test_long_write_that_goes_on_is_not_taken_for_death(tmp_path: Path) -> None:
    assert min(run_ranks(save_slowly, 2, str(tmp_path))) > 1.0
    assert value_in(tmp_path) == 1.0
