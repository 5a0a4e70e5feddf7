"""Behind the tripwire training works, and a save that talks through process groups dies as on a full GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from landfall.demo.prepare import prepare
from landfall.testing import tripwire
from landfall.testing.procs import run_ranks
from tests.testing.stock_save import restored_ok, stock_save

ERROR = "NCCL Error 1: unhandled cuda error (run with NCCL_DEBUG=INFO for details)"

NOT_COMMUNICATION = {
    "BackendType",
    "CUSTOM",
    "GLOO",
    "MPI",
    "NCCL",
    "UCC",
    "UNDEFINED",
    "XCCL",
    "abort",
    "bound_device_id",
    "boxed",
    "get_group_store",
    "group_desc",
    "group_name",
    "merge_remote_group",
    "name",
    "rank",
    "set_timeout",
    "shutdown",
    "size",
    "split_group",
    "unbox",
    "use_pg_for_symm_mem_rendezvous",
}


def collectives(rank: int, size: int, group: dist.ProcessGroup | None) -> dict[str, Callable[[], Any]]:
    """Every way to communicate that megatron-core and torch DCP use, with two ranks; all return a number."""
    from torch.distributed.distributed_c10d import _coalescing_manager

    mine = torch.full((4,), rank + 1.0)

    def all_reduce(async_op: bool = False) -> float:
        total = mine.clone()
        work = dist.all_reduce(total, group=group, async_op=async_op)
        if work is not None:
            work.wait()
        return total[0].item()

    def reduce_scatter() -> float:
        part = torch.empty(4 // size)
        dist.reduce_scatter_tensor(part, mine.clone(), group=group)
        return part[0].item()

    def all_gather() -> float:
        whole = torch.empty(4 * size)
        dist.all_gather_into_tensor(whole, mine, group=group)
        return whole.sum().item()

    def coalesced() -> float:
        buckets = [mine.clone() for _ in range(3)]
        parts = [torch.empty(4 // size) for _ in buckets]
        with _coalescing_manager(group, async_ops=True) as work:
            for part, bucket in zip(parts, buckets, strict=True):
                dist.reduce_scatter_tensor(part, bucket, group=group)
        work.wait()
        with _coalescing_manager(group, async_ops=True) as work:
            for part, bucket in zip(parts, buckets, strict=True):
                dist.all_gather_into_tensor(bucket, part, group=group)
        work.wait()
        return sum(bucket.sum().item() for bucket in buckets)

    def broadcast() -> float:
        got = mine.clone()
        dist.broadcast(got, src=1, group=group)
        return got[0].item()

    def all_to_all() -> float:
        got = torch.empty(4)
        dist.all_to_all_single(got, mine, group=group)
        return got.sum().item()

    def all_gather_object() -> float:
        ranks: list[int] = [0] * size
        dist.all_gather_object(ranks, rank + 1, group=group)
        return float(sum(ranks))

    def gather_object() -> float:
        ranks: list[int] | None = [0] * size if rank == 0 else None
        dist.gather_object(rank + 1, ranks, dst=0, group=group)
        return float(sum(ranks or [3]))

    def scatter_object() -> float:
        got: list[int] = [0]
        dist.scatter_object_list(got, [3, 3] if rank == 0 else None, src=0, group=group)
        return float(got[0])

    def send_and_receive() -> float:
        got = torch.empty(4)
        pair = [
            dist.P2POp(dist.isend, mine, 1 - rank, group),
            dist.P2POp(dist.irecv, got, 1 - rank, group),
        ]
        for work in dist.batch_isend_irecv(pair):
            work.wait()
        return got[0].item() + rank + 1

    def barrier() -> float:
        dist.barrier(group=group)
        return 0.0

    return {
        "all_reduce": all_reduce,
        "all_reduce_async": lambda: all_reduce(async_op=True),
        "reduce_scatter": reduce_scatter,
        "all_gather": all_gather,
        "coalesced": coalesced,
        "broadcast": broadcast,
        "all_to_all": all_to_all,
        "all_gather_object": all_gather_object,
        "gather_object": gather_object,
        "scatter_object": scatter_object,
        "send_and_receive": send_and_receive,
        "barrier": barrier,
    }


EXPECTED = {
    "all_reduce": 3.0,
    "all_reduce_async": 3.0,
    "reduce_scatter": 3.0,
    "all_gather": 12.0,
    "coalesced": 36.0,
    "broadcast": 2.0,
    "all_to_all": 6.0,
    "all_gather_object": 3.0,
    "gather_object": 3.0,
    "scatter_object": 3.0,
    "send_and_receive": 3.0,
    "barrier": 0.0,
}


def outcome(call: Callable[[], float]) -> float | str:
    try:
        return call()
    except RuntimeError as error:
        return str(error)


def call_everything(in_subgroup: bool) -> list[dict[str, float | str]]:
    dist.init_process_group("tripwire")
    group = dist.new_group([0, 1]) if in_subgroup else None
    calls = collectives(dist.get_rank(), dist.get_world_size(), group)
    unarmed = {name: outcome(call) for name, call in calls.items()}
    with tripwire.armed("nccl"):
        nccl = {name: outcome(call) for name, call in calls.items()}
    with tripwire.armed("strict"):
        strict = {name: outcome(call) for name, call in calls.items()}
    after = {name: outcome(call) for name, call in calls.items()}
    dist.destroy_process_group()
    return [unarmed, nccl, strict, after]


@pytest.mark.parametrize("in_subgroup", [False, True])
def test_calls_fail_only_while_armed_and_only_where_the_mode_says(in_subgroup: bool) -> None:
    for unarmed, nccl, strict, after in run_ranks(call_everything, 2, in_subgroup):
        assert unarmed == EXPECTED
        assert {name for name, result in nccl.items() if result == ERROR} == {
            "gather_object",
            "scatter_object",
            "send_and_receive",
        }
        assert all(result in (ERROR, EXPECTED[name]) for name, result in nccl.items())
        assert set(strict.values()) == {ERROR}
        assert after == EXPECTED


def swallow_an_error() -> tuple[dict[str, int], dict[str, int]]:
    dist.init_process_group("tripwire")
    dist.all_reduce(torch.ones(1))
    with tripwire.armed("strict"):
        thread = threading.Thread(target=lambda: outcome(lambda: dist.barrier() or 0.0))
        thread.start()
        thread.join()
    return dict(tripwire.calls()), dict(tripwire.calls_while_armed())


def test_calls_are_counted_even_if_a_thread_swallows_the_error() -> None:
    assert run_ranks(swallow_an_error, 1) == [({"allreduce": 1, "barrier": 1}, {"barrier": 1})]


def functional_all_reduce() -> str | float:
    import torch.distributed._functional_collectives as functional

    dist.init_process_group("tripwire")
    assert functional.all_reduce(torch.ones(1), "sum", dist.group.WORLD).item() == 2.0
    with tripwire.armed("strict"):
        return outcome(lambda: functional.all_reduce(torch.ones(1), "sum", dist.group.WORLD).item())


def test_collectives_from_cpp_code_do_not_slip_through() -> None:
    assert run_ranks(functional_all_reduce, 2) == [ERROR, ERROR]


def gloo_beside() -> list[str | float]:
    dist.init_process_group("tripwire")
    beside = dist.new_group(backend="gloo")
    with tripwire.armed("strict"):
        return [outcome(call) for call in collectives(dist.get_rank(), 2, beside).values()]


def test_groups_that_ask_for_gloo_stay_gloo() -> None:
    assert run_ranks(gloo_beside, 2) == [list(EXPECTED.values())] * 2


def test_every_method_of_this_torch_is_known() -> None:
    """A torch with a new collective must fail here, not slip through the tripwire."""
    public = {name for name in dir(dist.ProcessGroup) if not name.startswith("_")}
    assert public - NOT_COMMUNICATION - tripwire.POINT_TO_POINT - tripwire.COLLECTIVES == set()


def stock_save_behind(mode: str | None, folder: str) -> tuple[str, list[str], bool]:
    """What stock megatron-core raised, in which functions, and whether the checkpoint can be loaded."""
    dist.init_process_group("tripwire")
    if mode is not None:
        tripwire.arm(mode)  # type: ignore[arg-type]
    try:
        stock_save(folder)
    except RuntimeError as error:
        functions = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
        return str(error), functions, False
    return "", [], restored_ok(folder)


def test_stock_megatron_saves_behind_the_unarmed_tripwire(tmp_path: Path) -> None:
    assert run_ranks(stock_save_behind, 2, None, str(tmp_path)) == [("", [], True)] * 2


def test_stock_megatron_dies_where_the_report_says(tmp_path: Path) -> None:
    for message, functions, _ in run_ranks(stock_save_behind, 2, "nccl", str(tmp_path)):
        assert message == ERROR
        reported = ["save", "async_save", "save_state_dict_async_plan", "gather_object", "gather"]
        found = [name for name in functions if name in reported]
        assert list(dict.fromkeys(found)) == reported
    assert not (tmp_path / ".metadata").exists()


def torchrun(mode: str, around: list[str], program: list[str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "landfall.testing.tripwire", "--mode", mode]
    command += [f"--around={place}" for place in around]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*command, "-m", *program], env=environment, capture_output=True, text=True, timeout=240
    )


@pytest.mark.slow
def test_a_stock_program_dies_behind_the_tripwire_without_knowing_it(tmp_path: Path) -> None:
    stock = ["megatron.core.dist_checkpointing.serialization:save"]
    finished = torchrun("nccl", stock, ["tests.testing.stock_save", str(tmp_path)])
    assert finished.returncode == 1
    assert ERROR in finished.stderr and "in save_state_dict_async_plan" in finished.stderr
    assert "saved" not in finished.stdout


@pytest.mark.slow
def test_sft_saves_and_resumes_without_a_collective(tmp_path: Path) -> None:
    prepare(tmp_path, 2)
    around = [f"landfall.sft.checkpoint:{name}" for name in ("save_checkpoint", "load_checkpoint")]
    around += ["landfall.engine.save:save", "landfall.engine.load:load"]
    program = ["landfall.sft.worker", f"--model={tmp_path / 'model'}", "--model_type=qwen3_vl"]
    program += ["--load_safetensors=true", "--save_safetensors=true", f"--save={tmp_path / 'out'}"]
    program += [
        f"--dataset={tmp_path / 'data' / 'train.jsonl'}",
        "--split_dataset_ratio=0",
        "--num_workers=0",
    ]
    program += ["--micro_batch_size=2", "--global_batch_size=4", "--save_interval=2", "--add_version=false"]

    trained = torchrun("strict", around, [*program, "--finetune=true", "--train_iters=2"])
    assert trained.returncode == 0, trained.stderr[-4000:]
    resume = ["--finetune=false", "--train_iters=4", f"--load={tmp_path / 'out' / 'checkpoint-2'}"]
    resumed = torchrun("strict", around, [*program, *resume])
    assert resumed.returncode == 0, resumed.stderr[-4000:]

    assert (tmp_path / "out" / "checkpoint-4" / "landfall.json").exists()
    reports = re.findall("tripwire: (.*) behind strict: (.*)", trained.stderr + resumed.stderr)
    assert {place for place, _ in reports} == set(around)
    assert {made for _, made in reports} == {"no collective call"}
