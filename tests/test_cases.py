"""``cases.md`` and the ``case`` marks of the tests say the same."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parent
MARK = re.compile(r"@pytest\.mark\.case\(\"(\w+)\"\)")
ROW = re.compile(r"^\| (\w\d\d) \| .* \| (.*) \|$", re.MULTILINE)


def test_marked_cases_are_listed_with_their_files() -> None:
    rows = ROW.findall((TESTS / "cases.md").read_text())
    listed = {case: set(files.split(", ")) - {"-"} for case, files in rows}
    marked: dict[str, set[str]] = {case: set() for case in listed}
    for file in TESTS.rglob("test_*.py"):
        for case in MARK.findall(file.read_text()):
            assert case in listed, f"{file} stands for {case}, which is not in cases.md"
            marked[case].add(file.relative_to(TESTS).as_posix())
    stale = [
        f"{case}: {', '.join(sorted(marked[case])) or '-'}" for case in listed if listed[case] != marked[case]
    ]
    assert not stale, "cases.md needs these files:\n" + "\n".join(stale)
