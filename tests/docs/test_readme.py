"""What the README shows works as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from landfall.cli.main import COMMANDS

README = Path(__file__).parents[2] / "README.md"


def test_program_in_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    [program] = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    exec(compile(program, str(README), "exec"), {})
    assert (tmp_path / "checkpoint" / "landfall.json").exists()


def test_commands_in_the_readme_are_all_there_are() -> None:
    shown = set(re.findall(r"^\| `landfall (\w+)", README.read_text(), re.MULTILINE))
    assert shown == set(COMMANDS)


def test_files_that_the_readme_names_exist() -> None:
    links = re.findall(r"\]\(([\w./]+)\)", README.read_text())
    assert links and all((README.parent / link).exists() for link in links)
