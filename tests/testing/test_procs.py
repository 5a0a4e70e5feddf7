"""Ranks as tests start them: real processes, with everything they leave behind."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from landfall.testing.procs import RanksFailed, free_port, run_ranks, start_ranks


def sum_of_ranks(offset: int) -> tuple[int, float, int]:
    dist.init_process_group("gloo")
    total = torch.tensor([dist.get_rank() + offset])
    dist.all_reduce(total)
    return dist.get_rank(), total.item(), torch.get_num_threads()


def state_at_start() -> tuple[set[str], list[str], list[str]]:
    def threads(pid: int) -> list[str]:
        return [(task / "comm").read_text().strip() for task in Path(f"/proc/{pid}/task").iterdir()]

    return set(sys.modules), threads(os.getpid()), threads(os.getppid())


def one_raises(guilty: int) -> None:
    if int(os.environ["RANK"]) == guilty:
        raise LookupError(f"rank {guilty} lost its keys")
    time.sleep(600)


def wait_for_go(folder: str) -> str:
    rank = os.environ["RANK"]
    print(f"rank {rank} is here", flush=True)
    (Path(folder) / rank).touch()
    while not (Path(folder) / "go").exists():
        time.sleep(0.01)
    return f"{rank} of {os.environ['WORLD_SIZE']}"


def leave(code: int) -> None:
    os._exit(code)


def wait_for_files(folder: Path, num_files: int) -> None:
    until = time.monotonic() + 60
    while len(list(folder.iterdir())) < num_files:
        assert time.monotonic() < until, "the ranks did not come up"
        time.sleep(0.01)


def test_ranks_that_meet_return_results_by_rank() -> None:
    assert run_ranks(sum_of_ranks, 3, 10) == [(0, 33.0, 1), (1, 33.0, 1), (2, 33.0, 1)]


def test_ranks_start_with_the_heavy_modules_loaded_and_no_thread() -> None:
    for modules, in_rank, in_fork_server in run_ranks(state_at_start, 2):
        assert {"torch", "megatron.core", "transformers.models.qwen3_vl.modeling_qwen3_vl"} <= modules
        assert len(in_rank) == 1
        # pyarrow's allocator has one that gets over a fork; other tests preload pyarrow.
        assert len(set(in_fork_server) - {"jemalloc_bg_thd"}) == 1


def test_environment_reaches_the_ranks() -> None:
    assert run_ranks(os.getenv, 2, "LANDFALL_COLOUR", backend_env={"LANDFALL_COLOUR": "blue"}) == [
        "blue",
        "blue",
    ]
    assert "LANDFALL_COLOUR" not in os.environ


def test_a_rank_that_raises_ends_the_others_and_shows_both() -> None:
    with pytest.raises(RanksFailed) as caught:
        run_ranks(one_raises, 2, 1)
    assert "LookupError: rank 1 lost its keys" in caught.value.failures[1]
    assert "still ran" in caught.value.failures[0] and "in one_raises" in caught.value.failures[0]


def test_a_time_out_kills_all_and_shows_every_stack(tmp_path: Path) -> None:
    with start_ranks(wait_for_go, 2, str(tmp_path)) as ranks:
        wait_for_files(tmp_path, 2)
        with pytest.raises(RanksFailed, match="still run after 0.1 s") as caught:
            ranks.wait(timeout_s=0.1)
        assert [process.exitcode for process in ranks.processes] == [-signal.SIGKILL] * 2
    assert sorted(caught.value.failures) == [0, 1]
    for rank, text in caught.value.failures.items():
        assert "in wait_for_go" in text and f"rank {rank} is here" in text


def test_a_killed_rank_leaves_the_others_running(tmp_path: Path) -> None:
    with start_ranks(wait_for_go, 3, str(tmp_path)) as ranks:
        wait_for_files(tmp_path, 3)
        ranks.kill(1)
        (tmp_path / "go").touch()
        assert ranks.exit_codes() == [0, -signal.SIGKILL, 0]
        assert (ranks.result(0), ranks.result(2)) == ("0 of 3", "2 of 3")
        assert ranks.output(2) == "rank 2 is here\n"
        with pytest.raises(RanksFailed, match="exit code -9"):
            ranks.result(1)


def test_a_stopped_rank_ends_only_when_resumed(tmp_path: Path) -> None:
    with start_ranks(wait_for_go, 2, str(tmp_path)) as ranks:
        wait_for_files(tmp_path, 2)
        ranks.stop(1)
        (tmp_path / "go").touch()
        ranks.processes[0].join(30)
        assert ranks.processes[0].exitcode == 0
        ranks.processes[1].join(0.5)
        assert ranks.processes[1].exitcode is None
        ranks.resume(1)
        assert ranks.exit_codes() == [0, 0]


@pytest.mark.parametrize("code", [0, 7])
def test_a_rank_that_leaves_without_a_result_is_a_failure(code: int) -> None:
    with pytest.raises(RanksFailed, match=f"exit code {code}"):
        run_ranks(leave, 1, code)


def test_free_ports_can_be_listened_on() -> None:
    store = dist.TCPStore("localhost", free_port(), is_master=True, wait_for_workers=False)
    store.set("key", "value")
    assert store.get("key") == b"value"
