"""No flag or variable of the reported script is without a test that shows its effect."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

from landfall.sft.config import entries

REPORTED = Path(__file__).parents[1] / "data" / "reported_sft.sh"

SHOWN = {
    "model": "test_resume.test_exported_checkpoint_is_a_model_to_start_from",
    "model_type": "test_bad_input.test_bad_input_is_refused_before_training",
    "dataset": "test_flags_effect.test_images_are_bounded_and_long_rows_left_out_by_line",
    "save": "test_resume.test_killed_run_goes_on_as_if_it_had_never_stopped",
    "save_safetensors": "test_flags_effect.test_without_safetensors_weights_are_in_the_megatron_files",
    "split_dataset_ratio": "test_flags_effect.test_split_ratio_sets_that_share_aside",
    "load_from_cache_file": "test_flags_effect.test_cache_is_used_only_when_asked_for",
    "bf16": "test_flags_effect.test_bf16_computes_in_it_and_keeps_main_parameters_in_float32",
    "freeze_llm": "test_flags_effect.test_frozen_part_stays_as_it_is_and_out_of_the_optimizer",
    "freeze_vit": "test_flags_effect.test_frozen_part_stays_as_it_is_and_out_of_the_optimizer",
    "freeze_aligner": "test_flags_effect.test_frozen_part_stays_as_it_is_and_out_of_the_optimizer",
    "micro_batch_size": "test_flags_effect.test_lean_way_takes_less_memory_for_the_same_loss",
    "global_batch_size": "test_flags_effect.test_epochs_and_batch_size_decide_the_number_of_steps",
    "recompute_granularity": "test_flags_effect.test_lean_way_takes_less_memory_for_the_same_loss",
    "recompute_method": "model.test_recompute.test_recomputation_changes_no_bit_of_losses_and_gradients",
    "recompute_num_layers": "model.test_recompute.test_recomputation_changes_no_bit_of_losses_and_gradients",
    "finetune": "test_resume.test_finetune_starts_at_step_0_from_the_weights_alone",
    "cross_entropy_loss_fusion": "test_flags_effect.test_fused_loss_is_the_same",
    "lr": "test_flags_effect.test_rates_are_those_of_warmup_and_cosine",
    "lr_warmup_fraction": "test_flags_effect.test_rates_are_those_of_warmup_and_cosine",
    "min_lr": "test_flags_effect.test_rates_are_those_of_warmup_and_cosine",
    "max_epochs": "test_flags_effect.test_epochs_and_batch_size_decide_the_number_of_steps",
    "clip_grad": "test_flags_effect.test_gradients_are_clipped_to_the_limit",
    "save_interval": "test_flags_effect.test_intervals_decide_when_is_saved_and_evaluated",
    "eval_interval": "test_flags_effect.test_intervals_decide_when_is_saved_and_evaluated",
    "vit_gradient_checkpointing": "test_flags_effect.test_lean_way_takes_less_memory_for_the_same_loss",
    "max_length": "test_flags_effect.test_images_are_bounded_and_long_rows_left_out_by_line",
    "num_workers": "test_flags_effect.test_names_of_4x_and_worker_processes_train_the_same",
    "no_save_optim": "test_flags_effect.test_without_optimizer_and_random_state_weights_are_saved_once",
    "no_save_rng": "test_flags_effect.test_without_optimizer_and_random_state_weights_are_saved_once",
    "dataset_num_proc": "test_flags_effect.test_rows_are_prepared_by_as_many_processes_as_asked_for",
    "tensor_model_parallel_size": "test_layouts.test_sizes_decide_how_the_model_and_its_work_are_shared_out",
    "pipeline_model_parallel_size": "test_layouts.test_sizes_decide_how_the_model_and_its_work_are_shared_out",
    "context_parallel_size": "test_layouts.test_sizes_decide_how_the_model_and_its_work_are_shared_out",
    "sequence_parallel": "test_layouts.test_sequence_parallel_ranks_take_less_memory_for_the_same_loss",
    "IMAGE_MAX_TOKEN_NUM": "test_flags_effect.test_images_are_bounded_and_long_rows_left_out_by_line",
    "NPROC_PER_NODE": "test_launch.test_ranks_asked_for_are_started_by_torchrun",
}
"""The test that shows the effect of each flag of the reported script, below tests/sft."""


def test_every_flag_of_the_reported_script_is_shown_or_says_why_not() -> None:
    known = {entry.flag.env or entry.name: entry.flag for entry in entries()}
    given = re.findall(r"--(\w+)|^(\w+)=", REPORTED.read_text(), re.MULTILINE)
    names = {flag or variable for flag, variable in given}
    assert len(names) > 35
    for name in names - SHOWN.keys():
        one_value_or_none = len(known[name].built) == 1 or known[name].cpu.startswith("no: ")
        assert one_value_or_none, f"nothing shows what {name} does"
    for place in SHOWN.values():
        module, _, test = place.rpartition(".")
        assert hasattr(importlib.import_module(f"tests.sft.{module}"), test), place
