"""``landfall sft``: fine-tuning. The flags are in ``landfall.sft.flags``."""

from __future__ import annotations

from collections.abc import Sequence


def main(argv: Sequence[str]) -> int:
    """Train; returns the exit code of the run."""
    if "-h" in argv or "--help" in argv:
        from landfall.sft.flag_docs import help_text

        print(help_text())
        return 0
    from landfall.sft.launch import launch

    return launch(argv)
