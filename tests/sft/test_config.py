from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

from landfall.errors import UsageError
from landfall.sft.config import Resolved, entries, resolve
from landfall.sft.flag_docs import flags_markdown, help_text
from landfall.sft.flags.unbuilt import UNBUILT

ROOT = Path(__file__).parents[2]
REPORTED = ROOT / "tests" / "data" / "reported_sft.sh"
NEEDED = ["--model", "m", "--dataset", "a.jsonl", "--max_epochs", "1"]
QWEN_CONFIG = {
    "model_type": "qwen3_vl",
    "text_config": {"dtype": "bfloat16", "max_position_embeddings": 262144},
}


def resolved(flags: str = "", **environ: str) -> Resolved:
    return resolve([*NEEDED, *flags.split()], environ)


def refusal(flags: str = "", **environ: str) -> str:
    with pytest.raises(UsageError) as caught:
        resolved(flags, **environ)
    assert caught.value.exit_code == 2
    return str(caught.value)


def run_reported_script(folder: Path) -> tuple[list[str], dict[str, str]]:
    """The arguments and the environment that bash hands to ``megatron`` when it runs the reported script."""
    recorder = folder / "megatron"
    recorder.write_text(
        f"#!{sys.executable}\nimport json, os, sys\n"
        "json.dump([sys.argv[1:], dict(os.environ)], open(os.environ['RECORD'], 'w'))\n"
    )
    recorder.chmod(0o755)
    record = folder / "record.json"
    environ = dict(
        os.environ,
        PATH=f"{folder}:{os.environ['PATH']}",
        RECORD=str(record),
        SFT_DATASET="one.jsonl two.jsonl#500",
        SFT_DIR="/数据/模型/输出",
    )
    subprocess.run(["bash", str(REPORTED)], env=environ, check=True)
    argv, seen = json.loads(record.read_text())
    return argv, seen


def test_reported_script_is_accepted_as_it_is(tmp_path: Path) -> None:
    argv, environ = run_reported_script(tmp_path)
    assert argv[0] == "sft"

    found = resolve(argv[1:], environ)

    config = found.config
    assert config.dataset == ("one.jsonl", "two.jsonl#500")
    assert config.save == "/数据/模型/输出"
    assert (config.model, config.model_type) == ("Qwen3-VL-4B-Instruct", "qwen3_vl")
    assert (config.bf16, config.finetune, config.no_save_optim, config.no_save_rng) == (
        True,
        True,
        True,
        True,
    )
    assert (config.freeze_llm, config.freeze_vit, config.freeze_aligner) == (False, False, False)
    assert (config.recompute_granularity, config.recompute_method, config.recompute_num_layers) == (
        "full",
        "uniform",
        1,
    )
    assert (config.lr, config.min_lr, config.lr_warmup_fraction) == (1e-5, 1e-8, 0.05)
    assert (config.save_interval, config.eval_interval, config.max_epochs) == (10000, 10000, 1)
    assert (config.image_max_token_num, config.nproc_per_node) == (1600, 8)
    assert config.cuda_visible_devices == "0,1,2,3,4,5,6,7,8"
    assert config.pytorch_cuda_alloc_conf == "expandable_segments:True"
    assert (config.world_size, config.data_parallel_size, config.num_micro_batches) == (8, 8, 1)
    assert found.sources["lr"] == "flag"
    assert found.sources["image_max_token_num"] == "environment"
    assert found.sources["adam_beta2"] == "default"
    assert found.notes == ()


def test_defaults_are_those_of_3_12() -> None:
    config = resolved().config
    assert (config.micro_batch_size, config.global_batch_size) == (1, 16)
    assert (config.finetune, config.freeze_vit, config.freeze_aligner) == (False, True, True)
    assert (config.vit_gradient_checkpointing, config.cross_entropy_loss_fusion) == (True, False)
    assert (config.lr, config.min_lr, config.adam_beta2, config.weight_decay) == (1e-5, 0.0, 0.95, 0.1)
    assert (config.save_interval, config.log_interval, config.seed) == (500, 5, 42)
    assert (config.recompute_granularity, config.recompute_method) == ("selective", None)
    assert (config.padding_free, config.attention_backend, config.image_max_token_num) == (
        True,
        "flash",
        16384,
    )
    assert (config.cuda_device_max_connections, config.distributed_timeout_minutes) == (1, 300000)


def test_config_is_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        resolved().config.lr = 1.0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("flag", "name", "value"),
    [
        ("--tuner_type full", "train_type", "full"),
        ("--output_dir x", "save", "x"),
        ("--save_steps 7", "save_interval", 7),
        ("--eval_steps 7", "eval_interval", 7),
        ("--logging_steps 7", "log_interval", 7),
        ("--dataloader_num_workers 0", "num_workers", 0),
        ("--mcore_model x", "load", "x"),
        ("--resume_from_checkpoint x", "load", "x"),
        ("--max-length 128", "max_length", 128),
        ("--lr=3e-4", "lr", 3e-4),
        ("--num-train-epochs 1", "max_epochs", 1),
    ],
)
def test_other_spelling_sets_the_same_flag(flag: str, name: str, value: object) -> None:
    found = resolved(flag)
    assert getattr(found.config, name) == value
    assert found.sources[name] == "flag"


def test_two_names_with_the_same_value_are_accepted() -> None:
    assert resolved("--save_interval 7 --save_steps 7").config.save_interval == 7


def test_two_names_with_different_values_are_refused() -> None:
    message = refusal("--save_interval 7 --save_steps 8")
    assert "--save_interval and --save_steps are one flag" in message
    assert "--save_interval 7, --save_steps 8" in message


def test_repeated_flag_takes_the_last_value() -> None:
    assert resolved("--lr 1e-4 --lr 2e-4").config.lr == 2e-4


@pytest.mark.parametrize(
    ("text", "value"),
    [("true", True), ("1", True), ("YES", True), ("", True), ("false", False), ("0", False), ("no", False)],
)
def test_boolean_spellings(text: str, value: bool) -> None:
    assert resolved(f"--bf16 {text} --seed 1").config.bf16 is value


def test_none_leaves_an_optional_flag_open() -> None:
    config = resolved("--recompute_granularity none --max_length none").config
    assert (config.recompute_granularity, config.max_length) == (None, None)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--lr abc", "a number above 0"),
        ("--lr nan", "a number above 0"),
        ("--lr 0", "a number above 0"),
        ("--save_interval 0", "a whole number from 1 on"),
        ("--save_interval 1e3", "a whole number from 1 on"),
        ("--micro_batch_size 2.5", "a whole number from 1 on"),
        ("--lr_warmup_fraction 1.5", "a number from 0 to 1"),
        ("--split_dataset_ratio 1", "a number from 0 to below 1"),
        ("--bf16 maybe", "true or false"),
        ("--lr_decay_style cosin", "cosine or linear or constant"),
        ("--max_shard_size 5", "a size such as 5GB or 500MB"),
        ("--eval_iters -2", "-1 for all"),
        ("--save", "a folder"),
    ],
)
def test_impossible_value_is_refused_with_what_was_expected(flags: str, expected: str) -> None:
    message = refusal(flags)
    assert message.startswith(flags.split()[0])
    assert expected in message


def test_empty_shell_variable_is_named_as_the_cause() -> None:
    assert "if the value is a shell variable, it is empty" in refusal("--save --lr 1e-4")


def test_unquoted_value_with_spaces_is_refused() -> None:
    assert "'my' 'folder'" in refusal("--save my folder")


def test_unknown_flag_is_refused_with_the_closest_one() -> None:
    message = refusal("--lr_warmup_fracton 0.1 --zzz")
    assert "--lr_warmup_fracton, --zzz: no such flag" in message
    assert "did you mean --lr_warmup_fraction for --lr_warmup_fracton?" in message


def test_abbreviated_flag_is_refused() -> None:
    assert "--micro_batch" in refusal("--micro_batch 1")


def test_stray_word_is_refused() -> None:
    with pytest.raises(UsageError, match="not a flag"):
        resolve(["train", *NEEDED], {})


@pytest.mark.parametrize(
    "flags",
    [
        "--lora_rank 16",
        "--async_save true",
        "--optimizer_cpu_offload",
        "--moe_aux_loss_coeff 0.001",
        "--expert_model_parallel_size 2",
        "--streaming yes",
        "--use_precision_aware_optimizer true",
        "--adapter_load x",
        "--merge_lora true",
        "--target_modules linear_qkv",
        "--learning_rate 1e-5",
        "--packing true",
        "--train_type lora",
        "--truncation_strategy split",
        "--report_to wandb",
        "--report_to tensorboard swanlab",
        "--model_type qwen3_vl_moe",
        "--attention_backend unfused",
        "--attention_softmax_in_fp32 false",
    ],
)
def test_unbuilt_flag_is_refused_by_name(flags: str) -> None:
    message = refusal(flags)
    assert flags.split()[0] in message
    assert "known, but not built yet" in message
    assert "do: " in message


@pytest.mark.parametrize(
    "flags",
    [
        "--lora_rank 8 --lora_dropout 5e-2 --target_modules all-linear --moe_grouped_gemm --async_save false",
        "--packing false --train_type full --tensor_model_parallel_size 1 --streaming 0 --lora_dtype none",
        "--dataloader_persistent_workers true --ckpt_format torch_dist --report_to tensorboard",
    ],
)
def test_unbuilt_flag_with_its_default_passes(flags: str) -> None:
    assert resolved(flags).config == resolved().config


def test_all_unbuilt_flags_are_named_at_once() -> None:
    message = refusal("--lora_rank 16 --streaming true --moe_permute_fusion true")
    assert all(
        name in message for name in ("--lora_rank 16", "--streaming true", "--moe_permute_fusion true")
    )


def test_no_flag_is_both_usable_and_unbuilt() -> None:
    usable = {name for entry in entries() for name in (entry.name, *entry.flag.aliases) if not entry.flag.env}
    unbuilt = [name for group in UNBUILT for name in group.flags]
    assert usable.isdisjoint(unbuilt)
    assert len(unbuilt) == len(set(unbuilt))


@pytest.mark.parametrize("missing", ["--model", "--dataset", "--max_epochs"])
def test_missing_flag_is_named(missing: str) -> None:
    at = NEEDED.index(missing)
    with pytest.raises(UsageError, match=missing):
        resolve(NEEDED[:at] + NEEDED[at + 2 :], {})


def test_epochs_go_before_steps() -> None:
    found = resolved("--train_iters 100")
    assert (found.config.max_epochs, found.config.train_iters) == (1, None)
    assert "--train_iters 100 has no effect" in found.notes[0]


def test_steps_alone_are_enough() -> None:
    assert resolve(["--model", "m", "--dataset", "a", "--train_iters", "9"], {}).config.train_iters == 9


def test_derived_values_name_their_source() -> None:
    found = resolved("--save_interval 7")
    assert (found.config.eval_interval, found.sources["eval_interval"]) == (7, "derived")
    assert (found.config.save, found.sources["save"]) == ("megatron_output/m", "derived")


def test_val_dataset_switches_the_split_off() -> None:
    found = resolved("--val_dataset v.jsonl --split_dataset_ratio 0.1")
    assert found.config.split_dataset_ratio == 0.0
    assert "--split_dataset_ratio has no effect" in found.notes[0]


def test_sequence_parallel_without_tensor_parallel_is_off_with_a_note() -> None:
    found = resolved("--sequence_parallel true")
    assert found.config.sequence_parallel is False
    assert "--sequence_parallel has no effect" in found.notes[0]


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        ("--recompute_granularity full", "--recompute_method and --recompute_num_layers"),
        ("--recompute_granularity full --recompute_method block", "needs --recompute_num_layers"),
        ("--recompute_method uniform", "only for --recompute_granularity full"),
        ("--recompute_granularity none --recompute_num_layers 1", "only for --recompute_granularity full"),
        ("--lr 1e-6 --min_lr 1e-5", "at most --lr, 1e-06"),
        ("--vit_lr 1e-7 --min_lr 1e-6", "at most --vit_lr, 1e-07"),
        ("--lr_warmup_fraction 0.1 --lr_warmup_iters 5", "one of them"),
        ("--freeze_llm true", "nothing would be trained"),
        ("--overlap_param_gather true", "--overlap_grad_reduce"),
        ("--finetune true --resume_from_checkpoint x", "pass --finetune false"),
    ],
)
def test_values_that_contradict_are_refused(flags: str, part: str) -> None:
    assert part in refusal(flags)


def test_batch_that_ranks_cannot_share_is_refused_with_the_nearest_ones() -> None:
    message = refusal("--micro_batch_size 4 --global_batch_size 100", NPROC_PER_NODE="3")
    assert "100, with --micro_batch_size 4 on 3 data-parallel ranks" in message
    assert "the nearest are 96 and 108" in message


def test_nodes_multiply_the_ranks() -> None:
    environ = dict(NPROC_PER_NODE="4", NNODES="2", NODE_RANK="1", MASTER_ADDR="10.0.0.1")
    found = resolved("", **environ)
    assert (found.config.world_size, found.config.num_micro_batches) == (8, 2)
    assert (found.config.master_port, found.sources["master_port"]) == (29500, "derived")


@pytest.mark.parametrize(
    ("environ", "part"),
    [
        ({"NNODES": "2", "MASTER_ADDR": "a"}, "NODE_RANK is not set"),
        ({"NNODES": "2", "NODE_RANK": "0"}, "MASTER_ADDR is not set"),
        ({"NNODES": "2", "NODE_RANK": "2", "MASTER_ADDR": "a"}, "0 to 1"),
        ({"NPROC_PER_NODE": "gpu"}, "NPROC_PER_NODE"),
        ({"NPROC_PER_NODE": ""}, "NPROC_PER_NODE"),
        ({"MASTER_PORT": "70000"}, "a port from 1 to 65535"),
        ({"IMAGE_MAX_TOKEN_NUM": "0"}, "IMAGE_MAX_TOKEN_NUM"),
        ({"CUDA_VISIBLE_DEVICES": "0,1,1"}, "each once"),
        ({"CUDA_VISIBLE_DEVICES": "0;1"}, "CUDA_VISIBLE_DEVICES"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments=True"}, "expandable_segments:True"),
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "64"}, "1 to 32"),
        ({"MAX_PIXELS": "1003520"}, "IMAGE_MAX_TOKEN_NUM"),
    ],
)
def test_impossible_environment_is_refused(environ: dict[str, str], part: str) -> None:
    assert part in refusal("", **environ)


def test_allocator_settings_may_hold_lists() -> None:
    text = "roundup_power2_divisions:[256:1,512:2,>:4],max_split_size_mb:128"
    assert resolved("", PYTORCH_CUDA_ALLOC_CONF=text).config.pytorch_cuda_alloc_conf == text


def test_hidden_devices_are_accepted() -> None:
    assert resolved("", CUDA_VISIBLE_DEVICES="").config.cuda_visible_devices == ""


def test_video_variables_are_noted_and_their_defaults_are_not() -> None:
    found = resolved("", VIDEO_MAX_TOKEN_NUM="128", FPS_MAX_FRAMES="768", FPS="2.0", IMAGE_MIN_TOKEN_NUM="4")
    assert [note.split()[0] for note in found.notes] == ["VIDEO_MAX_TOKEN_NUM"]


def test_rank_takes_the_size_of_the_job_from_torchrun() -> None:
    environ = dict(RANK="5", LOCAL_RANK="1", WORLD_SIZE="8", LOCAL_WORLD_SIZE="4", GROUP_RANK="1", NNODES="2")
    config = resolved("", **environ).config
    assert (config.nproc_per_node, config.nnodes, config.node_rank) == (4, 2, 1)


def test_variables_that_only_the_launcher_has_set_are_not_the_users() -> None:
    environ = dict(OMP_NUM_THREADS="3", CUDA_DEVICE_MAX_CONNECTIONS="1", MASTER_PORT="29501")
    sources = resolved("", **environ, LANDFALL_UNSET="OMP_NUM_THREADS CUDA_DEVICE_MAX_CONNECTIONS").sources
    assert sources["omp_num_threads"] == "derived"
    assert sources["cuda_device_max_connections"] == "default"
    assert sources["master_port"] == "environment"


def test_model_config_fills_in_what_was_not_given() -> None:
    found = resolved().with_model(QWEN_CONFIG)
    assert (found.config.bf16, found.config.max_length) == (True, 262144)
    assert (found.sources["bf16"], found.sources["max_length"]) == ("model", "model")


def test_model_config_does_not_overrule_flags() -> None:
    found = resolved("--bf16 false --max_length 100").with_model(QWEN_CONFIG)
    assert (found.config.bf16, found.config.max_length, found.sources["bf16"]) == (False, 100, "flag")


@pytest.mark.parametrize("dtype", ["float16", None])
def test_model_in_another_precision_asks_for_the_flag(dtype: str | None) -> None:
    with pytest.raises(UsageError, match="--bf16 true"):
        resolved().with_model({"dtype": dtype, "max_position_embeddings": 100})


def test_table_shows_what_was_set_first() -> None:
    rows = resolved("--lr 3e-5", IMAGE_MAX_TOKEN_NUM="99").table()
    names = [row.name for row in rows]
    assert names.index("--lr") < names.index("IMAGE_MAX_TOKEN_NUM") < names.index("--adam_eps")
    assert sorted(names) == sorted(entry.shown for entry in entries())
    assert next(row for row in rows if row.name == "--lr") == (
        "Optimizer and learning rate",
        "--lr",
        3e-5,
        "flag",
    )


def test_args_json_holds_every_value() -> None:
    values = json.loads(json.dumps(resolved("--lr 3e-5").to_args_json()))
    assert set(values) == {entry.name for entry in entries()}
    assert (values["lr"], values["dataset"], values["max_epochs"]) == (3e-5, ["a.jsonl"], 1)


@pytest.mark.parametrize(
    ("text", "size_bytes"), [("5GB", 5 * 10**9), ("1.5MiB", 3 * 2**19), ("200mb", 2 * 10**8)]
)
def test_shard_size_is_read_in_both_units(text: str, size_bytes: int) -> None:
    assert resolved(f"--max_shard_size {text}").config.max_shard_size_bytes == size_bytes


def test_help_names_every_flag_with_its_other_names() -> None:
    text = help_text()
    for entry in entries():
        assert entry.shown in text
        assert all(f"--{alias}" in text for alias in entry.flag.aliases)


def test_committed_page_of_flags_is_up_to_date() -> None:
    page = (ROOT / "docs" / "flags.md").read_text(encoding="utf-8")
    assert page == flags_markdown() + "\n", "run: python -m landfall.sft.flag_docs > docs/flags.md"
