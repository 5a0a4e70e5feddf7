from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

LAUNCH = (
    "import os, sys; from landfall.sft.launch import launch;"
    "sys.exit(launch(sys.argv[1:], os.environ, entry='standin'))"
)
OURS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "NPROC_PER_NODE")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    config = {"model_type": "qwen3_vl", "dtype": "bfloat16", "max_position_embeddings": 4096}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def start(model: Path, *flags: str, **environ: str) -> subprocess.Popen[str]:
    inherited = {name: value for name, value in os.environ.items() if name not in OURS}
    place = {"PYTHONPATH": str(Path(__file__).parent), "STANDIN_DIR": str(model.parent)}
    argv = ["--model", str(model), "--dataset", "带 空格.jsonl", "--max_epochs", "1", *flags]
    return subprocess.Popen(
        [sys.executable, "-c", LAUNCH, *argv],
        env={**inherited, **place, **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    _, err = process.communicate(timeout=60)
    return process.returncode, err


def seen(model: Path, rank: int) -> dict[str, Any]:
    return json.loads((model.parent / f"rank-{rank}.json").read_text())


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def test_without_ranks_asked_for_one_runs_in_this_process(model: Path) -> None:
    process = start(model, "--lr", "1e-4")
    assert finish(process) == (0, "")

    environ = seen(model, 0)["environ"]
    assert seen(model, 0)["argv"][-2:] == ["--lr", "1e-4"]
    assert (environ["WORLD_SIZE"], environ["LOCAL_RANK"], environ["MASTER_ADDR"]) == ("1", "0", "127.0.0.1")
    assert 0 < int(environ["MASTER_PORT"]) < 65536
    assert int(environ["OMP_NUM_THREADS"]) == len(os.sched_getaffinity(0))
    assert environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert environ["LANDFALL_MODEL_FOLDER"] == str(model)
    assert {"OMP_NUM_THREADS", "MASTER_PORT", "NNODES"} <= set(environ["LANDFALL_UNSET"].split())


def test_exit_code_of_the_only_rank_is_returned(model: Path) -> None:
    assert finish(start(model, STANDIN_ENDS='{"0": 2}'))[0] == 2


def test_ranks_asked_for_are_started_by_torchrun(model: Path) -> None:
    process = start(model, "--eval_iters", "-1", NPROC_PER_NODE="2", IMAGE_MAX_TOKEN_NUM="1600")
    assert finish(process) == (0, "")

    for rank in range(2):
        environ = seen(model, rank)["environ"]
        assert seen(model, rank)["argv"][2:4] == ["--dataset", "带 空格.jsonl"]
        assert (environ["WORLD_SIZE"], environ["LOCAL_RANK"]) == ("2", str(rank))
        assert environ["IMAGE_MAX_TOKEN_NUM"] == "1600"
        assert environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
        assert int(environ["OMP_NUM_THREADS"]) == max(1, len(os.sched_getaffinity(0)) // 2)
    assert seen(model, 0)["environ"]["MASTER_PORT"] == seen(model, 1)["environ"]["MASTER_PORT"]


def test_variables_that_are_set_are_kept(model: Path) -> None:
    process = start(model, OMP_NUM_THREADS="3", CUDA_DEVICE_MAX_CONNECTIONS="8", NPROC_PER_NODE="1")
    assert finish(process)[0] == 0
    environ = seen(model, 0)["environ"]
    assert (environ["OMP_NUM_THREADS"], environ["CUDA_DEVICE_MAX_CONNECTIONS"]) == ("3", "8")


def test_failing_rank_gives_its_exit_code_and_one_line(model: Path) -> None:
    code, err = finish(start(model, NPROC_PER_NODE="2", STANDIN_ENDS='{"1": 2}'))
    assert code == 2
    assert err == "landfall: rank 1 ended with exit code 2; the other ranks on this node were stopped\n"


def test_killed_rank_gives_the_signal(model: Path) -> None:
    code, err = finish(start(model, NPROC_PER_NODE="2", STANDIN_ENDS='{"0": -9}'))
    assert code == 128 + signal.SIGKILL
    assert err.startswith("landfall: rank 0 was killed by signal 9")
    assert err.count("\n") == 1


def test_signal_to_the_launcher_reaches_all_ranks_and_waits_for_them(model: Path) -> None:
    process = start(model, NPROC_PER_NODE="2", STANDIN_WAIT="1")
    deadline = time.monotonic() + 60
    while not all((model.parent / f"ready-{rank}").exists() for rank in range(2)):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)

    process.send_signal(signal.SIGTERM)

    assert finish(process) == (128 + signal.SIGTERM, "")
    assert all((model.parent / f"saved-{rank}").exists() for rank in range(2))


def test_two_nodes_form_one_job(model: Path) -> None:
    common = dict(NPROC_PER_NODE="1", NNODES="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port())
    nodes = [start(model, **common, NODE_RANK=str(rank)) for rank in range(2)]
    assert [finish(node) for node in nodes] == [(0, ""), (0, "")]
    found = [seen(model, rank)["environ"] for rank in range(2)]
    assert [(environ["WORLD_SIZE"], environ["GROUP_RANK"]) for environ in found] == [("2", "0"), ("2", "1")]


def test_rank_of_a_foreign_launcher_starts_no_others(model: Path) -> None:
    process = start(
        model, RANK="1", LOCAL_RANK="1", WORLD_SIZE="2", MASTER_ADDR="h", MASTER_PORT="1", NPROC_PER_NODE="2"
    )
    assert finish(process) == (0, "")
    assert sorted(path.name for path in model.parent.glob("rank-*")) == ["rank-1.json"]


def test_occupied_port_is_reported_as_such(model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        code, err = finish(start(model, NPROC_PER_NODE="1", MASTER_PORT=port))
    assert code != 0
    assert "LandfallError: the nodes did not find each other" in err
    assert f"MASTER_PORT {port}" in err


def test_model_that_cannot_be_used_ends_before_any_rank_starts(model: Path) -> None:
    (model / "config.json").write_text('{"model_type": "llama"}')
    code, err = finish(start(model, NPROC_PER_NODE="2"))
    assert code != 0
    assert "got: model_type llama" in err
    assert not list(model.parent.glob("rank-*"))
