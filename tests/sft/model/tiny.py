"""A Qwen3-VL small enough for tests, rows for it, and its weights in transformers' model and in ours."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from landfall.models.qwen3_vl import Qwen3VLNames
from landfall.sft import cpu
from landfall.sft.data.batch import Example, MicroBatch, collate
from landfall.sft.data.positions import mrope_positions
from landfall.sft.model.build import ModelOptions, build_model
from landfall.sft.model.qwen3_vl import Qwen3VLModel

IMAGE, VOCAB, MERGE = 290, 300, 2
PATCH_VALUES = 3 * 2 * 4 * 4


def config(tied: bool = False, **text: int) -> Qwen3VLConfig:
    """Head size 32 where hidden / heads is 16; two query groups; deepstack after two of three layers."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 4, 4], "mrope_interleaved": True}
    return Qwen3VLConfig(
        text_config={
            "vocab_size": VOCAB,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "rms_norm_eps": 1e-5,
            "rope_parameters": rope,
            **text,
        },
        vision_config={
            "depth": 3,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 2,
            "out_hidden_size": 64,
            "patch_size": 4,
            "spatial_merge_size": MERGE,
            "temporal_patch_size": 2,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0, 1],
        },
        image_token_id=IMAGE,
        video_token_id=291,
        vision_start_token_id=292,
        vision_end_token_id=293,
        tie_word_embeddings=tied,
    )


GRIDS = {"text": (), "image": ((1, 4, 4),), "images": ((1, 2, 6), (1, 4, 2))}


def row(kind: str, length: int, seed: int) -> Example:
    """``length`` text tokens with the images of ``kind`` among them; the last third has labels."""
    draw = torch.Generator().manual_seed(seed)
    text = torch.randint(0, 280, (length,), generator=draw)
    grids = torch.tensor(GRIDS[kind], dtype=torch.int64).reshape(-1, 3)
    pieces: list[torch.Tensor] = [text[:2]]
    for grid in grids:
        num_tokens = int(grid.prod()) // MERGE**2
        pieces += [torch.tensor([292]), torch.full((num_tokens,), IMAGE), torch.tensor([293])]
    ids = torch.cat([*pieces, text[2:]])
    labels = ids.clone()
    labels[: -length // 3] = -100
    pixels = torch.randn(int(grids.prod(dim=1).sum()), PATCH_VALUES, generator=draw)
    has_images = len(grids) > 0
    return Example(
        input_ids=ids,
        labels=labels,
        position_ids=positions(ids, grids),
        pixel_values=pixels if has_images else None,
        grid_thw=grids if has_images else None,
        source=f"{kind}:{seed}",
    )


def positions(ids: torch.Tensor, grids: torch.Tensor) -> torch.Tensor:
    if not len(grids):
        return torch.arange(len(ids)).expand(3, -1).clone()
    return torch.from_numpy(np.ascontiguousarray(mrope_positions(ids.numpy(), grids.numpy(), IMAGE, MERGE)))


def rows(kinds: Sequence[str], seed: int = 0) -> list[Example]:
    """One row of each kind; lengths differ."""
    return [row(kind, 7 + (3 * i) % 8, 100 * seed + i) for i, kind in enumerate(kinds)]


def joined(*kinds: str, seed: int = 0) -> MicroBatch:
    return collate(rows(kinds, seed))


def reference(hf_config: Qwen3VLConfig, seed: int = 3) -> Qwen3VLForConditionalGeneration:
    """transformers' model in float32, with weights large enough that every part of it matters."""
    torch.manual_seed(seed)
    model = Qwen3VLForConditionalGeneration(hf_config).float()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data += 0.1 * torch.randn_like(parameter)
        elif parameter.dim() > 1:
            parameter.data *= 3
    return model.train()


def answer(model: Qwen3VLForConditionalGeneration, example: Example) -> torch.Tensor:
    """transformers' logits [T, vocabulary] of one row."""
    ids = example.input_ids[None]
    images = {}
    if example.pixel_values is not None:
        images = {"pixel_values": example.pixel_values, "image_grid_thw": example.grid_thw}
    return model(input_ids=ids, mm_token_type_ids=(ids == IMAGE).int(), **images).logits[0]


def names(hf_config: Qwen3VLConfig, model: Qwen3VLModel) -> Qwen3VLNames:
    language = model.language_model
    shard = language.embedding.word_embeddings.weight.shape[0] if language.pre_process else 0
    tp = parallel_state.get_tensor_model_parallel_world_size()
    return Qwen3VLNames.from_config(hf_config.to_dict(), vocab_rows=max(shard * tp, VOCAB))


def parameters(model: Qwen3VLModel) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Named as if there were one pipeline stage."""
    offset = get_transformer_layer_offset(model.config)
    for name, parameter in model.named_parameters():
        head, layers, rest = name.partition("decoder.layers.")
        if layers:
            layer, rest = rest.split(".", 1)
            name = f"{head}{layers}{int(layer) + offset}.{rest}"
        yield name, parameter


def gathered(tensors: dict[str, torch.Tensor], pieces: list, num_rows: int) -> torch.Tensor:
    """A whole megatron parameter (or gradient) from Hugging Face's tensors; padding rows are 0."""
    whole = torch.zeros(num_rows, *pieces[0].hf_shape[1:])
    for piece in pieces:
        taken = tensors[piece.hf_name][piece.hf_row : piece.hf_row + piece.num_rows]
        whole[piece.row : piece.row + piece.num_rows] = taken
    return whole


@torch.no_grad()
def load(hf: Qwen3VLForConditionalGeneration, model: Qwen3VLModel) -> None:
    """Give ``model``, any parallel part of it, the weights of ``hf``."""
    tensors = hf.state_dict()
    tp = parallel_state.get_tensor_model_parallel_world_size()
    rank = parallel_state.get_tensor_model_parallel_rank()
    table = names(hf.config, model)
    for name, parameter in parameters(model):
        split = getattr(parameter, "tensor_model_parallel", False)
        axis = getattr(parameter, "partition_dim", 0) if split else 0
        pieces = table.pieces(name)
        whole = gathered(tensors, pieces, parameter.shape[0] * (tp if split and axis == 0 else 1))
        if split:
            halves = whole.chunk(2) if "linear_fc1" in name else (whole,)
            whole = torch.cat([half.chunk(tp, dim=axis)[rank] for half in halves])
        parameter.copy_(whole)


def make(hf: Qwen3VLForConditionalGeneration, options: ModelOptions | None = None) -> Qwen3VLModel:
    """Our model with the weights of ``hf``."""
    model = build_model(hf.config, options or ModelOptions())
    load(hf, model)
    return model.train()


def join(options: ModelOptions | None = None) -> None:
    """Become a rank of the job that the environment describes, or the only one."""
    options = options or ModelOptions()
    cpu.install()
    store = None if "RANK" in os.environ else dist.HashStore()
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if store is None:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    parallel_state.initialize_model_parallel(
        options.tensor_model_parallel_size,
        options.pipeline_model_parallel_size,
        context_parallel_size=options.context_parallel_size,
        create_gloo_process_groups=False,
    )
    torch.manual_seed(1)
    model_parallel_cuda_manual_seed(1, force_reset_rng=True)


def leave() -> None:
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
