"""Tied and untied heads come through import, a step and export in every split, as transformers has them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, Qwen3VLForConditionalGeneration

from tests.sft.trainer import World, run_sft


def write_model(world: World, folder: Path, tied: bool) -> Path:
    """Two language layers, three vision blocks, deepstack on two levels."""
    shutil.copytree(world.model, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    config = AutoConfig.from_pretrained(world.model)
    config.text_config.num_hidden_layers = 2
    config.tie_word_embeddings = config.text_config.tie_word_embeddings = tied
    torch.manual_seed(1)
    Qwen3VLForConditionalGeneration(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def keys_of(folder: Path) -> set[str]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        return set(file.keys())


def logits_of(folder: Path) -> torch.Tensor:
    model, told = Qwen3VLForConditionalGeneration.from_pretrained(folder, output_loading_info=True)
    assert not any(told.values()), told
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(20)[None]).logits.float()


@pytest.mark.case("e02")
@pytest.mark.parametrize(("tied", "num_keys"), [(True, 81), (False, 82)], ids=["tied", "untied"])
def test_head_is_exported_as_transformers_saves_it(
    tied: bool, num_keys: int, world: World, tmp_path: Path
) -> None:
    model = write_model(world, tmp_path / "model", tied)
    training = {"model": model, "train_iters": 1}
    one = run_sft(world, tmp_path / "one", **training).checkpoint(1)
    two = run_sft(world, tmp_path / "two", 2, tensor_model_parallel_size=2, **training).checkpoint(1)
    for folder in (one, two):
        assert keys_of(folder) == keys_of(model) and len(keys_of(folder)) == num_keys
        assert ("lm_head.weight" in keys_of(folder)) != tied
        assert AutoConfig.from_pretrained(folder).tie_word_embeddings == tied
    logits = logits_of(one)
    assert not torch.equal(logits, logits_of(model))
    torch.testing.assert_close(logits_of(two), logits, rtol=0, atol=1e-4)
    assert torch.equal(logits_of(two).argmax(-1), logits.argmax(-1))
