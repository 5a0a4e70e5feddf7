from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from landfall.errors import CheckpointError, UsageError
from landfall.models.qwen3_vl import Qwen3VLNames, padded_vocab_size

SMALL_VISION = dict(depth=24, hidden_size=1024, intermediate_size=4096, deepstack_visual_indexes=[5, 11, 17])
LARGE_VISION = dict(depth=27, hidden_size=1152, intermediate_size=4304, deepstack_visual_indexes=[8, 16, 24])
PUBLISHED = {
    "2B": (2048, 28, 6144, 16, True, SMALL_VISION),
    "4B": (2560, 36, 9728, 32, True, SMALL_VISION),
    "8B": (4096, 36, 12288, 32, False, LARGE_VISION),
    "32B": (5120, 64, 25600, 64, False, LARGE_VISION),
}
"""Hidden size, layers, ffn, heads, tied, vision."""


def config(
    *,
    tied: bool = True,
    layers: int = 2,
    groups: int = 2,
    heads_per_group: int = 2,
    head_dim: int = 8,
    hidden: int = 12,
    ffn: int = 20,
    vocab: int = 50,
    vision: dict[str, Any] | None = None,
) -> Qwen3VLConfig:
    tiny = dict(depth=3, hidden_size=8, intermediate_size=12, num_heads=2, deepstack_visual_indexes=[0, 1])
    return Qwen3VLConfig(
        text_config=dict(
            vocab_size=vocab,
            hidden_size=hidden,
            intermediate_size=ffn,
            num_hidden_layers=layers,
            num_attention_heads=groups * heads_per_group,
            num_key_value_heads=groups,
            head_dim=head_dim,
        ),
        vision_config={**(vision or {**tiny, "num_position_embeddings": 16}), "out_hidden_size": hidden},
        tie_word_embeddings=tied,
    )


def published(name: str) -> Qwen3VLConfig:
    hidden, layers, ffn, heads, tied, vision = PUBLISHED[name]
    return config(
        tied=tied,
        layers=layers,
        groups=8,
        heads_per_group=heads // 8,
        head_dim=128,
        hidden=hidden,
        ffn=ffn,
        vocab=151936,
        vision={**vision, "num_heads": 16, "num_position_embeddings": 2304},
    )


def saved_shapes(config: Qwen3VLConfig) -> dict[str, tuple[int, ...]]:
    """What transformers saves for a model: its state dict, less the head that a tied model shares."""
    with torch.device("meta"):
        state = Qwen3VLForConditionalGeneration(config).state_dict()
    if config.tie_word_embeddings:
        del state["lm_head.weight"]
    return {name: tuple(tensor.shape) for name, tensor in state.items()}


def weights(names: Qwen3VLNames) -> dict[str, torch.Tensor]:
    """Different numbers for every element of every tensor of the model."""
    return {name: torch.rand(shape) for name, shape in names.hf_shapes().items()}


def to_megatron(names: Qwen3VLNames, hf: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    out = {name: torch.full(shape, torch.nan) for name, shape in names.megatron_shapes().items()}
    for name, tensor in out.items():
        for piece in names.pieces(name):
            rows = hf[piece.hf_name][piece.hf_row : piece.hf_row + piece.num_rows]
            tensor[piece.row : piece.row + piece.num_rows] = rows
    return out


def to_hf(names: Qwen3VLNames, megatron: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    out = {name: torch.full(shape, torch.nan) for name, shape in names.hf_shapes().items()}
    for name, tensor in out.items():
        for megatron_name, piece in names.sources(name):
            rows = megatron[megatron_name][piece.row : piece.row + piece.num_rows]
            tensor[piece.hf_row : piece.hf_row + piece.num_rows] = rows
    return out


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_model_has_the_names_shapes_and_order_that_transformers_saves(name: str) -> None:
    model = published(name)
    shapes = Qwen3VLNames.from_config(model.to_dict()).hf_shapes()
    assert list(shapes.items()) == list(saved_shapes(model).items())


@pytest.mark.case("e02")
@pytest.mark.parametrize(("tied", "num_keys"), [(True, 81), (False, 82)])
def test_tied_and_untied_model_have_exactly_the_keys_of_transformers_own_save(
    tied: bool, num_keys: int, tmp_path: Any
) -> None:
    model = Qwen3VLForConditionalGeneration(config(tied=tied))
    model.save_pretrained(tmp_path)
    from safetensors import safe_open

    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        saved = set(file.keys())
    shapes = Qwen3VLNames.from_config(model.config.to_dict()).hf_shapes()
    assert set(shapes) == saved
    assert len(shapes) == num_keys
    assert ("lm_head.weight" in shapes) is not tied


def test_megatron_tensors_hold_the_values_that_megatron_expects() -> None:
    model = config(tied=False, groups=3, heads_per_group=2)
    names = Qwen3VLNames.from_config(model.to_dict(), vocab_rows=64)
    hf = weights(names)
    megatron = to_megatron(names, hf)
    layer, attention = "model.language_model.layers.1.", "model.language_model.layers.1.self_attn."
    q, k, v = (hf[f"{attention}{x}_proj.weight"].reshape(3, -1, 12) for x in "qkv")
    decoder = "language_model.decoder.layers.1."
    expected = {
        f"{decoder}self_attention.linear_qkv.weight": torch.cat([q, k, v], dim=1).reshape(-1, 12),
        f"{decoder}self_attention.linear_proj.weight": hf[f"{attention}o_proj.weight"],
        f"{decoder}self_attention.q_layernorm.weight": hf[f"{attention}q_norm.weight"],
        f"{decoder}self_attention.k_layernorm.weight": hf[f"{attention}k_norm.weight"],
        f"{decoder}mlp.linear_fc1.weight": torch.cat(
            [hf[f"{layer}mlp.{x}_proj.weight"] for x in ("gate", "up")]
        ),
        f"{decoder}mlp.linear_fc2.weight": hf[f"{layer}mlp.down_proj.weight"],
        f"{decoder}input_layernorm.weight": hf[f"{layer}input_layernorm.weight"],
        f"{decoder}pre_mlp_layernorm.weight": hf[f"{layer}post_attention_layernorm.weight"],
        "language_model.decoder.final_layernorm.weight": hf["model.language_model.norm.weight"],
        "visual.blocks.2.attn.qkv.bias": hf["model.visual.blocks.2.attn.qkv.bias"],
        "visual.patch_embed.proj.weight": hf["model.visual.patch_embed.proj.weight"],
    }
    for name, tensor in expected.items():
        assert torch.equal(megatron[name], tensor), name
    for name, hf_name in (
        ("language_model.output_layer.weight", "lm_head.weight"),
        ("language_model.embedding.word_embeddings.weight", "model.language_model.embed_tokens.weight"),
    ):
        assert torch.equal(megatron[name][:50], hf[hf_name])
        assert megatron[name].shape == (64, 12) and megatron[name][50:].isnan().all()
    num_layer_names = sum(name.startswith(decoder) for name in megatron)
    assert num_layer_names == sum(name.startswith(decoder) for name in expected) == 8


@given(
    groups=st.integers(1, 5),
    heads_per_group=st.integers(1, 4),
    head_dim=st.sampled_from([2, 4, 6]),
    hidden=st.integers(1, 9),
    ffn=st.integers(1, 9),
    vocab=st.integers(1, 40),
    layers=st.integers(2, 4),
    tied=st.booleans(),
    padding=st.integers(0, 9),
)
@settings(max_examples=40, deadline=None)
def test_round_trip_through_megatron_gives_every_weight_back(padding: int, **sizes: Any) -> None:
    model = config(**sizes)
    names = Qwen3VLNames.from_config(model.to_dict(), vocab_rows=sizes["vocab"] + padding)
    hf = weights(names)
    megatron = to_megatron(names, hf)
    holes = {name for name, tensor in megatron.items() if tensor.isnan().any()}
    assert all(padding and "embedding" in name or "output_layer" in name for name in holes)
    back = to_hf(names, megatron)
    assert back.keys() == hf.keys()
    assert all(torch.equal(back[name], hf[name]) for name in hf)


def test_every_hugging_face_row_has_exactly_one_place_in_megatron() -> None:
    names = Qwen3VLNames.from_config(published("4B").to_dict(), vocab_rows=padded_vocab_size(151936, 128, 8))
    for hf_name, shape in names.hf_shapes().items():
        row = 0
        for megatron_name, piece in names.sources(hf_name):
            assert piece.hf_row == row and piece in names.pieces(megatron_name)
            row += piece.num_rows
        assert row == shape[0], hf_name


def test_fused_norm_names_mean_the_plain_ones() -> None:
    names = Qwen3VLNames.from_config(config().to_dict())
    plain, fused = list(names.megatron_shapes()), list(names.megatron_shapes(fused_norms=True))
    changed = {new for old, new in zip(plain, fused, strict=True) if old != new}
    assert changed == {
        f"language_model.decoder.layers.{layer}.{name}.layer_norm_weight"
        for layer in (0, 1)
        for name in ("self_attention.linear_qkv", "mlp.linear_fc1")
    }
    for old, new in zip(plain, fused, strict=True):
        assert names.pieces(old) == names.pieces(new)


def test_tied_model_takes_the_last_stages_output_layer_from_the_embedding() -> None:
    names = Qwen3VLNames.from_config(config(tied=True).to_dict())
    assert "language_model.output_layer.weight" not in names.megatron_shapes()
    output = names.pieces("language_model.output_layer.weight")
    assert output == names.pieces("language_model.embedding.word_embeddings.weight")


def test_tie_override_wins_over_the_config() -> None:
    untied = Qwen3VLNames.from_config(config(tied=True).to_dict(), tie_word_embeddings=False)
    assert "lm_head.weight" in untied.hf_shapes()


def test_unknown_names_are_refused() -> None:
    names = Qwen3VLNames.from_config(config().to_dict())
    with pytest.raises(CheckpointError, match="language_model.decoder.layers.7"):
        names.pieces("language_model.decoder.layers.7.mlp.linear_fc1.weight")
    with pytest.raises(CheckpointError, match="lm_head.weight"):
        names.sources("lm_head.weight")


def test_vocabulary_smaller_than_the_models_is_refused() -> None:
    with pytest.raises(UsageError, match="at least 50"):
        Qwen3VLNames.from_config(config().to_dict(), vocab_rows=49)


@pytest.mark.parametrize(
    ("vocab", "divisible_by", "tp", "padded"),
    [
        (151936, 128, 1, 151936),
        (151936, 128, 8, 152576),
        (151669, 128, 2, 151808),
        (1, 128, 4, 512),
        (512, 1, 1, 512),
    ],
)
def test_vocabulary_is_padded_to_a_multiple_for_every_tensor_parallel_rank(
    vocab: int, divisible_by: int, tp: int, padded: int
) -> None:
    assert padded_vocab_size(vocab, divisible_by, tp) == padded
