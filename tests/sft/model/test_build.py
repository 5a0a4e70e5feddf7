from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

from landfall.errors import UsageError
from landfall.sft.model.build import ModelOptions, build_model, transformer_config_from_hf
from landfall.testing.procs import RanksFailed, run_ranks
from tests.sft.model import tiny


def test_architecture_follows_the_hugging_face_config() -> None:
    config = transformer_config_from_hf(tiny.config(), ModelOptions(bf16=True))
    assert (config.num_layers, config.hidden_size, config.ffn_hidden_size) == (4, 64, 96)
    assert (config.num_attention_heads, config.num_query_groups, config.kv_channels) == (4, 2, 32)
    assert config.layernorm_epsilon == 1e-5 and config.params_dtype == torch.bfloat16


def test_parsed_config_json_builds_the_same_model() -> None:
    as_file = json.loads(json.dumps(tiny.config().to_dict()))
    shapes = [
        {n: p.shape for n, p in build_model(c, ModelOptions()).named_parameters()}
        for c in (as_file, tiny.config())
    ]
    assert shapes[0] == shapes[1]


def test_config_json_of_older_transformers_keeps_its_rotary_positions() -> None:
    config = tiny.config(tied=True).to_dict()
    rope = config["text_config"].pop("rope_parameters")
    config["text_config"]["rope_theta"] = rope.pop("rope_theta")
    config["text_config"]["rope_scaling"] = {**rope, "mrope_section": [6, 5, 5]}
    config["vision_config"].pop("rope_parameters", None)
    config["vision_config"]["model_type"] = "qwen3_vl"
    model = build_model(config, ModelOptions())
    assert model.language_model.rotary.base == 1e4 and model.share_embeddings_and_output_weights
    assert [int((model.language_model.rotary.axes == axis).sum()) for axis in range(3)] == [6, 5, 5]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"recompute_granularity": "full"}, "recompute_method"),
        ({"recompute_granularity": "half"}, "half"),
        (
            {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 3},
            "divide the layers",
        ),
        ({"tensor_model_parallel_size": 3}, "divisible|multiple"),
        ({"sequence_parallel": True}, "sequence paral"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(UsageError, match=match):
        build_model(tiny.config(), ModelOptions(**options))


def test_model_that_is_not_qwen3_vl_is_refused() -> None:
    with pytest.raises(UsageError, match="hidden_act"):
        build_model(tiny.config(hidden_act="gelu"), ModelOptions())  # type: ignore[arg-type]


def build_a_stage(options: ModelOptions) -> None:
    tiny.join(options)
    build_model(tiny.config(), options)


def test_first_stage_too_short_for_deepstack_is_refused() -> None:
    with pytest.raises(RanksFailed, match="too few layers"):
        run_ranks(build_a_stage, 4, ModelOptions(pipeline_model_parallel_size=4))


def test_bf16_model_keeps_its_frequencies_exact() -> None:
    model = build_model(tiny.config(), ModelOptions(bf16=True))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    frequencies = model.visual.rotary_pos_emb.inv_freq
    assert frequencies.dtype == torch.float32 and not torch.equal(frequencies, frequencies.bfloat16().float())


@pytest.mark.case("e02")
@pytest.mark.parametrize(("tied", "num_keys"), [(True, 81), (False, 82)])
def test_parameters_are_exactly_transformers_tensors(tied: bool, num_keys: int) -> None:
    hf = tiny.reference(tiny.config(tied, num_hidden_layers=2))
    model = build_model(hf.config, ModelOptions())
    table = tiny.names(hf.config, model)
    covered = {piece.hf_name for name, _ in model.named_parameters() for piece in table.pieces(name)}
    saved = set(hf.state_dict()) - ({"lm_head.weight"} if tied else set())
    assert covered == saved and len(covered) == num_keys
    assert {name: tuple(p.shape) for name, p in model.named_parameters()} == table.megatron_shapes()


@pytest.mark.parametrize("tied", [False, True])
def test_sharded_state_holds_the_parameters_themselves(tied: bool) -> None:
    model = build_model(tiny.config(tied), ModelOptions())
    state = model.sharded_state_dict()
    tensors = {k: v for k, v in state.items() if isinstance(v, ShardedTensor | ShardedTensorFactory)}
    parameters = dict(model.named_parameters())
    held = {id(value.data) for value in tensors.values()}
    assert held == {id(parameter) for parameter in parameters.values()}
    assert all(key.startswith(("language_model.", "visual.")) for key in state)
    assert ("language_model.output_layer.weight" in state) != tied


def shards(options: ModelOptions) -> dict[str, tuple[Any, ...]]:
    tiny.join(options)
    state = build_model(tiny.config(), options).sharded_state_dict()
    return {
        k: (v.global_shape, v.global_offset, v.replica_id)
        for k, v in state.items()
        if isinstance(v, ShardedTensor)
    }


def test_vision_tower_is_one_tensor_with_two_replicas_over_tensor_parallel_ranks() -> None:
    first, second = run_ranks(shards, 2, ModelOptions(tensor_model_parallel_size=2))
    for key, (shape, offset, replica) in first.items():
        if key.startswith("visual."):
            assert (shape, offset) == second[key][:2] and replica != second[key][2]
    qkv = next(key for key in first if key.endswith("linear_qkv.weight"))
    assert first[qkv][1] != second[qkv][1] and first[qkv][2] == second[qkv][2]


def save_and_load(folder: str, options: ModelOptions) -> float:
    """The largest difference after stock megatron-core saved the model and loaded it into another."""
    tiny.join(options)
    saved = tiny.make(tiny.reference(tiny.config()), options)
    metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    dist_checkpointing.save(saved.sharded_state_dict(metadata=metadata), folder)
    other = build_model(tiny.config(), options)
    loaded = dist_checkpointing.load(other.sharded_state_dict(metadata=metadata), folder)
    other.load_state_dict(loaded, strict=False)
    pairs = zip(saved.parameters(), other.parameters(), strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


@pytest.mark.slow
def test_stock_megatron_saves_and_loads_it_on_the_cpu(tmp_path: Any) -> None:
    options = replace(ModelOptions(), tensor_model_parallel_size=2)
    assert run_ranks(save_and_load, 2, str(tmp_path), options) == [0.0, 0.0]
