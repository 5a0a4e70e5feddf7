from __future__ import annotations

import os
import subprocess
import sys

import pytest

from landfall import __version__
from landfall.cli.main import COMMANDS, main

HEAVY = ("torch", "numpy", "transformers", "megatron", "huggingface_hub", "rich", "datasets")


def run(*argv: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from landfall.cli.main import run; run()", *argv]
    return subprocess.run(command, env={**os.environ, **environ}, capture_output=True, text=True, timeout=60)


def test_help_names_every_command_and_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(command in out for command in COMMANDS)
    assert "landfall demo" in out and "landfall sft --model" in out


def test_no_command_shows_help_and_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "usage: landfall COMMAND" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"landfall {__version__}\n"


def test_unknown_command_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train"]) == 2
    assert "train: no such command" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["--help"], ["sft", "--help"], ["verify", "--help"], ["demo", "--help"]])
def test_help_imports_nothing_heavy(argv: list[str]) -> None:
    code = (
        "import sys; from landfall.cli.main import main; import landfall.sft.launch;"
        f"assert main({argv!r}) == 0;"
        f"print(*[name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr.strip()) == (0, "")


def test_wrong_flag_is_reported_once_without_traceback_and_starts_nothing() -> None:
    done = run("sft", "--modle", "x", NPROC_PER_NODE="8")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("landfall: --modle: no such flag")
    assert "did you mean --model for --modle?" in done.stderr
    assert "Traceback" not in done.stderr and done.stderr.count("--modle: no such flag") == 1


def test_reader_that_closes_early_causes_no_traceback() -> None:
    command = f"{sys.executable} -c 'from landfall.cli.main import run; run()' sft --help | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("usage:")
    assert done.stderr == ""


@pytest.mark.parametrize("argv", [["verify"], ["verify", "a", "b"], ["demo", "--ranks", "0"]])
def test_wrong_arguments_of_a_command_are_usage_errors(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    assert f"usage: landfall {argv[0]}" in capsys.readouterr().err
