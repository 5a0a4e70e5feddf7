"""Names and shapes of dense Qwen3-VL: Hugging Face's and megatron's, and which rows are which.

Everything reduces to row blocks: some rows (dimension 0) of a megatron parameter are some rows of one
Hugging Face tensor, unchanged. Shapes are model space: what a parameter has when nothing is split.

megatron side: ``language_model.`` + megatron-core's GPTModel names, ``visual.`` + the names of transformers'
Qwen3VLVisionModel. ``linear_qkv`` interleaves by query group (the group's query rows, its key rows, its value
rows), ``linear_fc1`` is gate over up, embedding and output may have padding rows at the end that no Hugging
Face tensor knows. Everything else is copied whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from landfall.errors import CheckpointError, UsageError
from landfall.models.qwen3_vl_config import check_config

_LAYER_COPIES = {
    "self_attn.o_proj.weight": "self_attention.linear_proj.weight",
    "self_attn.q_norm.weight": "self_attention.q_layernorm.weight",
    "self_attn.k_norm.weight": "self_attention.k_layernorm.weight",
    "mlp.down_proj.weight": "mlp.linear_fc2.weight",
    "input_layernorm.weight": "input_layernorm.weight",
    "post_attention_layernorm.weight": "pre_mlp_layernorm.weight",
}
"""Hugging Face's to megatron's names of what a layer copies whole."""

_FUSED_NORMS = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}
"""Names of the norms in TransformerEngine's fused layers, and in every megatron checkpoint."""

_EMBED, _LM_HEAD = "model.language_model.embed_tokens.weight", "lm_head.weight"

Shape = tuple[int, ...]
_Rows = tuple[str, int, int]
"""hf_name, hf_row, num_rows: a block of rows of a Hugging Face tensor."""


@dataclass(frozen=True)
class Piece:
    """Rows [row, row + num_rows) of a megatron parameter are [hf_row, hf_row + num_rows) of ``hf_name``."""

    row: int
    num_rows: int
    hf_name: str
    hf_row: int
    hf_shape: Shape
    """Of the whole Hugging Face tensor."""


def padded_vocab_size(vocab_size: int, divisible_by: int, tp: int) -> int:
    """Rows of megatron's embedding: ``vocab_size`` rounded up to a multiple of ``divisible_by`` * ``tp``."""
    multiple = divisible_by * tp
    return -(-vocab_size // multiple) * multiple


@dataclass(frozen=True)
class Qwen3VLNames:
    """The parameters of one Qwen3-VL model under both names. Made by :meth:`from_config`."""

    text: Mapping[str, Any]
    """``text_config`` of config.json."""
    vision: Mapping[str, Any]
    """``vision_config`` of config.json."""
    tied: bool
    """Embedding and output share one tensor: Hugging Face has no lm_head, megatron no output_layer."""
    vocab_rows: int
    """Rows of megatron's embedding, padding included."""

    @classmethod
    def from_config(
        cls,
        config: Mapping[str, Any],
        *,
        tie_word_embeddings: bool | None = None,
        vocab_rows: int | None = None,
    ) -> Qwen3VLNames:
        """From the parsed config.json of a Hugging Face folder; UsageError if it is not supported.

        ``tie_word_embeddings`` overrides the config's; ``vocab_rows`` is :func:`padded_vocab_size`'s result,
        the unpadded size if left out.
        """
        check_config(config)
        text, vision = config["text_config"], config["vision_config"]
        rows = text["vocab_size"] if vocab_rows is None else vocab_rows
        if rows < text["vocab_size"]:
            raise UsageError(
                "the padded vocabulary is smaller than the vocabulary",
                got=str(rows),
                expected=f"at least {text['vocab_size']}",
            )
        tied = config.get("tie_word_embeddings", False)
        return cls(text, vision, tied if tie_word_embeddings is None else tie_word_embeddings, rows)

    def hf_shapes(self) -> dict[str, Shape]:
        """Name -> shape of every tensor that a Hugging Face folder holds, in transformers' order."""
        return dict(self._hf_shapes)

    def megatron_shapes(self, *, fused_norms: bool = False) -> dict[str, Shape]:
        """Name -> shape of every parameter of the megatron model.

        ``fused_norms``: with the norms' names inside TransformerEngine's layers, which are also their names
        in megatron checkpoints.
        """
        shapes: dict[str, Shape] = {}
        for name, pieces in self._pieces.items():
            padded = pieces[0].hf_name in (_EMBED, _LM_HEAD)
            num_rows = self.vocab_rows if padded else sum(piece.num_rows for piece in pieces)
            shapes[_fused(name) if fused_norms else name] = (num_rows, *pieces[0].hf_shape[1:])
        return shapes

    def pieces(self, megatron_name: str) -> list[Piece]:
        """Where the rows of a megatron parameter come from, in row order; padding rows have no piece.

        Takes both names of the norms. A tied model's ``output_layer`` (the copy that the last pipeline
        stage keeps) comes from the embedding.
        """
        name = _unfused(megatron_name)
        if self.tied and name == "language_model.output_layer.weight":
            name = "language_model.embedding.word_embeddings.weight"
        if name not in self._pieces:
            raise CheckpointError(
                f"{megatron_name} is not a parameter of this model",
                expected=f"one of {len(self._pieces)} names, such as {next(reversed(self._pieces))}",
                do="check that the checkpoint and config.json are of the same model",
            )
        return list(self._pieces[name])

    def sources(self, hf_name: str) -> list[tuple[str, Piece]]:
        """The way back: the pieces of a Hugging Face tensor in row order, each with its megatron name."""
        if hf_name not in self._sources:
            raise CheckpointError(
                f"{hf_name} is not a tensor of this model",
                expected=f"one of {len(self._sources)} names, such as {_EMBED}",
                do="check that the weights and config.json are of the same model",
            )
        return list(self._sources[hf_name])

    @cached_property
    def _hf_shapes(self) -> dict[str, Shape]:
        return {**dict(_vision_shapes(self.vision)), **dict(_text_shapes(self.text, self.tied))}

    @cached_property
    def _pieces(self) -> dict[str, list[Piece]]:
        return {name: list(self._stack(blocks)) for name, blocks in self._blocks()}

    @cached_property
    def _sources(self) -> dict[str, list[tuple[str, Piece]]]:
        found: dict[str, list[tuple[str, Piece]]] = {name: [] for name in self._hf_shapes}
        for name, pieces in self._pieces.items():
            for piece in pieces:
                found[piece.hf_name].append((name, piece))
        return {name: sorted(pieces, key=lambda source: source[1].hf_row) for name, pieces in found.items()}

    def _stack(self, blocks: list[_Rows]) -> Iterator[Piece]:
        row = 0
        for hf_name, hf_row, num_rows in blocks:
            yield Piece(row, num_rows, hf_name, hf_row, self._hf_shapes[hf_name])
            row += num_rows

    def _blocks(self) -> Iterator[tuple[str, list[_Rows]]]:
        """Every megatron parameter with the blocks of rows that it is made of, top to bottom."""
        for hf_name in self._hf_shapes:
            if hf_name.startswith("model.visual."):
                yield hf_name.removeprefix("model."), [self._all_rows(hf_name)]
        yield "language_model.embedding.word_embeddings.weight", [self._all_rows(_EMBED)]
        for layer in range(self.text["num_hidden_layers"]):
            yield from self._layer_blocks(
                f"model.language_model.layers.{layer}.", f"language_model.decoder.layers.{layer}."
            )
        norm = "model.language_model.norm.weight"
        yield "language_model.decoder.final_layernorm.weight", [self._all_rows(norm)]
        if not self.tied:
            yield "language_model.output_layer.weight", [self._all_rows(_LM_HEAD)]

    def _layer_blocks(self, hf: str, megatron: str) -> Iterator[tuple[str, list[_Rows]]]:
        yield f"{megatron}self_attention.linear_qkv.weight", list(self._by_query_group(f"{hf}self_attn."))
        gate_up = [self._all_rows(f"{hf}mlp.{name}_proj.weight") for name in ("gate", "up")]
        yield f"{megatron}mlp.linear_fc1.weight", gate_up
        for hf_name, megatron_name in _LAYER_COPIES.items():
            yield megatron + megatron_name, [self._all_rows(hf + hf_name)]

    def _by_query_group(self, attention: str) -> Iterator[_Rows]:
        groups, head_dim = self.text["num_key_value_heads"], self.text["head_dim"]
        query_rows = self.text["num_attention_heads"] // groups * head_dim
        for group in range(groups):
            for name, num_rows in (("q", query_rows), ("k", head_dim), ("v", head_dim)):
                yield f"{attention}{name}_proj.weight", group * num_rows, num_rows

    def _all_rows(self, hf_name: str) -> _Rows:
        return hf_name, 0, self._hf_shapes[hf_name][0]


def _text_shapes(text: Mapping[str, Any], tied: bool) -> Iterator[tuple[str, Shape]]:
    hidden, head_dim, ffn = text["hidden_size"], text["head_dim"], text["intermediate_size"]
    query, key_value = text["num_attention_heads"] * head_dim, text["num_key_value_heads"] * head_dim
    yield _EMBED, (text["vocab_size"], hidden)
    for i in range(text["num_hidden_layers"]):
        layer = f"model.language_model.layers.{i}."
        yield f"{layer}self_attn.q_proj.weight", (query, hidden)
        yield f"{layer}self_attn.k_proj.weight", (key_value, hidden)
        yield f"{layer}self_attn.v_proj.weight", (key_value, hidden)
        yield f"{layer}self_attn.o_proj.weight", (hidden, query)
        yield f"{layer}self_attn.q_norm.weight", (head_dim,)
        yield f"{layer}self_attn.k_norm.weight", (head_dim,)
        yield f"{layer}mlp.gate_proj.weight", (ffn, hidden)
        yield f"{layer}mlp.up_proj.weight", (ffn, hidden)
        yield f"{layer}mlp.down_proj.weight", (hidden, ffn)
        yield f"{layer}input_layernorm.weight", (hidden,)
        yield f"{layer}post_attention_layernorm.weight", (hidden,)
    yield "model.language_model.norm.weight", (hidden,)
    if not tied:
        yield _LM_HEAD, (text["vocab_size"], hidden)


def _vision_shapes(vision: Mapping[str, Any]) -> Iterator[tuple[str, Shape]]:
    hidden, ffn, patch = vision["hidden_size"], vision["intermediate_size"], vision["patch_size"]
    merged, out = hidden * vision["spatial_merge_size"] ** 2, vision["out_hidden_size"]
    kernel = (vision["in_channels"], vision["temporal_patch_size"], patch, patch)
    yield from _affine("patch_embed.proj", (hidden, *kernel))
    yield "model.visual.pos_embed.weight", (vision["num_position_embeddings"], hidden)
    for i in range(vision["depth"]):
        block = f"blocks.{i}"
        yield from _affine(f"{block}.norm1", (hidden,))
        yield from _affine(f"{block}.norm2", (hidden,))
        yield from _affine(f"{block}.attn.qkv", (3 * hidden, hidden))
        yield from _affine(f"{block}.attn.proj", (hidden, hidden))
        yield from _affine(f"{block}.mlp.linear_fc1", (ffn, hidden))
        yield from _affine(f"{block}.mlp.linear_fc2", (hidden, ffn))
    deepstack = range(len(vision["deepstack_visual_indexes"]))
    for merger, norm in [("merger", hidden), *((f"deepstack_merger_list.{i}", merged) for i in deepstack)]:
        yield from _affine(f"{merger}.norm", (norm,))
        yield from _affine(f"{merger}.linear_fc1", (merged, merged))
        yield from _affine(f"{merger}.linear_fc2", (out, merged))


def _affine(name: str, shape: Shape) -> Iterator[tuple[str, Shape]]:
    yield f"model.visual.{name}.weight", shape
    yield f"model.visual.{name}.bias", shape[:1]


def _fused(name: str) -> str:
    for plain, fused in _FUSED_NORMS.items():
        if name.startswith("language_model.") and name.endswith(f".{plain}"):
            return name.removesuffix(plain) + fused
    return name


def _unfused(name: str) -> str:
    for plain, fused in _FUSED_NORMS.items():
        if name.endswith(f".{fused}"):
            return name.removesuffix(fused) + plain
    return name
