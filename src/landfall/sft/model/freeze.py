"""Which parts of the model are not trained."""

from __future__ import annotations

from landfall.errors import UsageError
from landfall.sft.model.qwen3_vl import Qwen3VLModel

_ALIGNERS = ("visual.merger.", "visual.deepstack_merger_list.")


def part_of(name: str) -> str:
    """``llm``, ``vit`` or ``aligner``: the part that a parameter of a Qwen3VLModel belongs to."""
    if name.startswith(_ALIGNERS):
        return "aligner"
    return "vit" if name.startswith("visual.") else "llm"


def apply_freeze(model: Qwen3VLModel, freeze_llm: bool, freeze_vit: bool, freeze_aligner: bool) -> None:
    """Train only what is not frozen. The aligner is what maps image features to the language model.

    Call it before the model is wrapped for data parallelism. UsageError if nothing would be trained.
    """
    frozen = {"llm": freeze_llm, "vit": freeze_vit, "aligner": freeze_aligner}
    if all(frozen.values()):
        raise UsageError(
            "freeze_llm, freeze_vit and freeze_aligner are all set: there is nothing to train",
            do="set at least one of them to false",
        )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not frozen[part_of(name)])
