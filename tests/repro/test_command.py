"""``landfall repro`` as it is called."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from landfall.cli.main import main


def run(*argv: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from landfall.cli.main import run; run()", "repro", *argv]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["--ranks", "1"], "--ranks 1"),
        (["--timeout_s", "0"], "--timeout_s 0"),
        (["--report", "/no/such/folder/r.md"], "/no/such/folder/r.md"),
        (["--only", "tar"], "invalid choice: 'tar'"),
    ],
)
def test_wrong_input_is_told_before_anything_starts(
    argv: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["repro", *argv]) == 2
    assert told in capsys.readouterr().err


def test_help_says_what_the_exit_codes_mean(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["repro", "--help"]) == 0
    assert "exit codes: 0 stock failed as it is known to" in " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the test below has the real thing")
def test_stock_dies_and_ours_lands_side_by_side(tmp_path: Path) -> None:
    finished = run("--ranks", "2", "--json", "--report", str(tmp_path / "r.md"))
    assert finished.returncode == 0, finished.stderr
    found = json.loads(finished.stdout)
    entries = {entry["name"]: entry for entry in found["results"]}
    assert len(entries) == 16 and found["ok"] and not found["on_gpu"]
    assert entries["stock/full/save"]["verdict"] == "FAILED in gather_object"
    assert entries["dcp_nccl/full/load"]["verdict"] == "FAILED in gather_object"
    assert [entry["ok"] for name, entry in entries.items() if name.startswith(("landfall", "dcp_gloo"))] == [
        True
    ] * 8
    assert [len(race["seconds"]) for race in found["races"]] == [5, 5]
    assert "There is no GPU here" in finished.stderr and "Stock fails as reported" in finished.stderr
    assert "| **save, tripwire armed** | **FAILED in gather_object** |" in (tmp_path / "r.md").read_text()


@pytest.mark.slow
def test_stock_alone_is_judged_alone() -> None:
    finished = run("--ranks", "2", "--only", "stock")
    assert finished.returncode == 0, finished.stdout
    assert "Stock fails as reported. (" in finished.stdout and "landfall saves" not in finished.stdout


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_full_gpu_stock_dies_and_ours_takes_no_device_memory() -> None:
    finished = run("--json")
    found = json.loads(finished.stdout)
    assert finished.returncode == 0, finished.stderr
    entries = {entry["name"]: entry for entry in found["results"]}
    assert found["on_gpu"] and not entries["stock/full/save"]["ok"]
    for room in ("roomy", "full"):
        for action in ("save", "load"):
            ours = entries[f"landfall/{room}/{action}"]
            assert ours["driver_bytes"] == ours["reserved_bytes"] == ours["peak_bytes"] == 0
