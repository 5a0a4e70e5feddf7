"""What is shown of a run on a GPU: on the terminal, in Markdown, as JSON."""

from __future__ import annotations

import io
import json

import msgspec
from rich.console import Console

from landfall.repro.outcome import Outcome
from landfall.repro.report import to_json, to_markdown
from landfall.repro.table import show
from landfall.repro.words import facts, median, span, trouble, verdict

from .results import as_reported, bad, good, outcome


def shown(found: Outcome, width: int = 116) -> str:
    text = io.StringIO()
    show(found, Console(file=text, width=width, highlight=False))
    return text.getvalue()


def test_the_table_puts_stock_and_ours_side_by_side() -> None:
    lines = shown(outcome(as_reported())).splitlines()
    heads = next(line for line in lines if "megatron-core 0.19.2 " in line and "landfall" in line)
    saves = next(line for line in lines if "save, GPU full" in line)
    assert saves.index("FAILED in gather_object") == heads.index("megatron-core")
    assert saves.index("saved") == heads.index("landfall")
    assert any("GPU memory, for good" in line and "486 MiB" in line and "0 MiB" in line for line in lines)
    assert any("3 failed; 0-2, 4-7 hung" in line for line in lines)


def test_the_exception_its_place_and_where_others_hang_are_shown_whole() -> None:
    text = shown(outcome(as_reported()), width=60)
    assert (
        "rank 3: RuntimeError: NCCL Error 1: unhandled cuda error (run with NCCL_DEBUG=INFO for details)"
        in text
    )
    assert "at megatron/core/x.py:10 save_state_dict_async_plan" in text
    assert "rank 0-2, 4-7: hung until stopped\n    at megatron/core/x.py:10 save\n" in text


def test_the_cause_has_five_points_and_this_run_s_figure() -> None:
    text = shown(outcome(as_reported()))
    assert all(f"  {number}. " in text for number in range(1, 6)) and "  6. " not in text
    assert "(here 486 MiB)" in text


def test_a_run_that_was_not_as_expected_says_so_last() -> None:
    results = as_reported()
    results[2] = good("stock", "full", "save")
    text = shown(outcome(results))
    assert "NO   stock megatron-core 0.19.2 fails on the full GPU, in the reported place: saved" in text
    assert text.rstrip().splitlines()[-1].startswith("NOT as expected")


def test_what_a_load_reads_whose_save_failed_is_told() -> None:
    told = "Where a save has failed, the load below it reads what the same writer saved before."
    assert told in shown(outcome(as_reported())) and told in to_markdown(outcome(as_reported()), "x")
    ours = [result for result in as_reported() if result.step.writer == "landfall"]
    assert told not in shown(outcome(ours))


def test_the_full_card_and_the_race_are_told() -> None:
    text = shown(outcome(as_reported()))
    assert "the driver has 8 MiB left" in text
    assert "torch DCP, gloo: fastest 0.100 s, median 0.200 s" in text
    assert "landfall: fastest 0.040 s, median 0.055 s" in text


def test_markdown_has_command_versions_table_and_failures() -> None:
    text = to_markdown(outcome(as_reported()), "landfall repro --report a.md")
    assert "- command: `landfall repro --report a.md`" in text
    assert "8 ranks on one NVIDIA H200 (139.7 GiB), NCCL 2.28.9, torch 2.11.0, megatron-core 0.19.2" in text
    assert "| **save, GPU full** | **FAILED in gather_object** | **saved** |" in text
    assert "| GPU memory, for good | 486 MiB | 0 MiB |" in text
    assert "### megatron-core 0.19.2: save, GPU full\n\n```\nrank 3: RuntimeError: NCCL Error 1" in text


def test_json_can_be_read_back_and_has_what_the_table_has() -> None:
    found = json.loads(json.dumps(to_json(outcome(as_reported()))))
    entries = {entry["name"]: entry for entry in found["results"]}
    assert found["ok"] is True and found["about"]["megatron_core"] == "0.19.2"
    assert entries["stock/roomy/save"]["driver_bytes"] == 486 << 20
    assert entries["stock/full/save"]["attempts"][3]["failure"]["kind"] == "RuntimeError"
    assert entries["landfall/full/save"]["ok"] and entries["landfall/full/save"]["collectives"] == {}


def test_a_load_that_is_not_intact_is_called_damaged() -> None:
    result = good("landfall", "full", "load")
    *others, last = result.attempts
    result = msgspec.structs.replace(result, attempts=[*others, msgspec.structs.replace(last, intact=False)])
    assert verdict(result) == "DAMAGED" and facts(result, on_gpu=True)["bit for bit"] == "NO"


def test_memory_is_left_out_where_it_was_not_measured() -> None:
    assert "GPU memory, for good" not in facts(bad("stock", "full", "save"), on_gpu=True)
    assert "GPU memory, for good" not in facts(good("stock", "roomy", "save"), on_gpu=False)


def test_trouble_is_silent_where_all_went_well() -> None:
    assert trouble(good("landfall", "full", "save")) == []


def test_ranks_and_medians_are_told_as_people_do() -> None:
    assert span([0, 1, 2, 4, 6, 7]) == "0-2, 4, 6-7" and span([]) == ""
    assert median([1.0, 2.0, 9.0]) == 2.0 and median([1.0, 2.0, 3.0, 9.0]) == 2.5
