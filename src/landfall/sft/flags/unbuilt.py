"""Flags of ms-swift and Megatron that landfall knows and does not have: refused by name, never ignored.

A flag that is given the value it has anyway asks for nothing, and passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from landfall.sft.flags.spec import NO, NONE, YES


@dataclass(frozen=True)
class Unbuilt:
    """Flags with one answer. ``table`` lists ``name=value|value``, the values that pass; none always does."""

    group: str
    do: str
    table: str
    flags: dict[str, tuple[str, ...]] = field(init=False)

    def __post_init__(self) -> None:
        pairs = [item.partition("=") for item in self.table.split()]
        object.__setattr__(self, "flags", {name: tuple(values.split("|")) for name, _, values in pairs})


UNBUILT = (
    Unbuilt(
        "LoRA and adapters",
        "leave it out: landfall trains all parameters of what isn't frozen (--train_type full)",
        """lora_rank=8 lora_alpha=32 lora_dropout=0.05 lora_bias=none lora_dtype use_rslora=false
        target_modules=all-linear target_regex modules_to_save merge_lora=false adapter_load mcore_adapter
        adapters tuner_backend=peft""",
    ),
    Unbuilt(
        "Freezing by parameter",
        "use --freeze_llm, --freeze_vit and --freeze_aligner",
        """freeze_parameters freeze_parameters_regex freeze_parameters_ratio=0 trainable_parameters
        trainable_parameters_regex""",
    ),
    Unbuilt(
        "Other parallelism",
        "leave it out: ranks share the work by --tensor_model_parallel_size, --pipeline_model_parallel_size (the "
        "same number of layers on each), --context_parallel_size and --sequence_parallel",
        """decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers
        account_for_embedding_in_pipeline_split=false account_for_loss_in_pipeline_split=false
        num_layers_per_virtual_pipeline_stage num_virtual_stages_per_pipeline_rank
        virtual_pipeline_model_parallel_size microbatch_group_size_per_virtual_pipeline_stage
        microbatch_group_size_per_vp_stage pipeline_model_parallel_layout tp_comm_overlap=false cp_comm_type
        use_megatron_fsdp=false sequence_parallel_size=1""",
    ),
    Unbuilt(
        "Experts",
        "leave it out: the dense Qwen3-VL models that landfall trains have no experts",
        """expert_model_parallel_size=1 expert_tensor_parallel_size=1 num_experts moe_layer_freq
        moe_ffn_hidden_size moe_shared_expert_intermediate_size moe_grouped_gemm=true moe_permute_fusion=false
        moe_aux_loss_coeff=0 moe_z_loss_coeff moe_shared_expert_overlap=false moe_layer_recompute=false
        moe_expert_capacity_factor moe_pad_expert_input_to_capacity=false moe_token_drop_policy=probs
        moe_enable_deepep=false moe_token_dispatcher_type=alltoall moe_router_dtype=fp32 moe_router_topk
        moe_router_num_groups moe_router_group_topk moe_router_pre_softmax moe_router_load_balancing_type
        moe_router_score_function moe_router_bias_update_rate moe_router_enable_expert_bias
        moe_router_topk_scaling_factor moe_apply_probs_on_input""",
    ),
    Unbuilt(
        "Other optimizers",
        "leave it out: landfall trains with AdamW, its state in float32 on the device",
        """optimizer=adam sgd_momentum=0.9 optimizer_cpu_offload=false optimizer_offload_fraction=1
        use_precision_aware_optimizer=false main_grads_dtype=fp32 main_params_dtype=fp32 exp_avg_dtype=fp32
        exp_avg_sq_dtype=fp32 apply_wd_to_qk_layernorm=false""",
    ),
    Unbuilt(
        "Other schedules",
        "leave it out: the learning rate decays over all steps, and the weight decay stays",
        """lr_decay_iters lr_warmup_init=0 lr_wsd_decay_style=exponential lr_wsd_decay_iters
        weight_decay_incr_style=constant start_weight_decay end_weight_decay""",
    ),
    Unbuilt(
        "Other ways to save and load",
        "leave it out: a checkpoint is written every --save_interval steps",
        """save_strategy=steps async_save=false use_persistent_ckpt_worker=false create_checkpoint_symlink=false
        ckpt_format=torch_dist auto_detect_ckpt_format=true exit_on_missing_checkpoint=true
        no_initialization=true perform_initialization=false ckpt_fully_parallel_load=false
        ckpt_assume_constant_structure=false dist_ckpt_save_pre_mcore_014=false
        dist_ckpt_optim_fully_reshardable=false distrib_optim_fully_reshardable_mem_efficient=false
        save_missing_weights=false load_args=false load_data_args=false""",
    ),
    Unbuilt(
        "Other logs",
        "leave it out: everything is in logging.jsonl and the tensorboard files",
        """wandb_project=megatron-swift wandb_exp_name wandb_save_dir swanlab_project=megatron-swift
        swanlab_exp_name swanlab_token swanlab_workspace swanlab_mode=cloud logging_level
        tensorboard_log_interval=1 tensorboard_queue_size=50 log_timers_to_tensorboard=true
        no_log_learning_rate_to_tensorboard=false log_validation_ppl_to_tensorboard=true
        log_memory_to_tensorboard=true log_params_norm=false log_throughput=false""",
    ),
    Unbuilt(
        "Other ways to read data",
        "leave it out: --dataset is read as a whole, and --seed decides the order of its rows",
        """streaming=false data_seed=42 dataset_shuffle=true val_dataset_shuffle=false strict=false
        train_dataloader_shuffle=true no_data_sharding=false data_sharding=false group_by_length=false
        cached_dataset cached_val_dataset lazy_tokenize=true dataloader_type=cyclic
        dataloader_pin_memory=true dataloader_persistent_workers=true|false dataloader_prefetch_factor=2
        packing_length packing_num_proc=1 interleave_prob stopping_strategy=first_exhausted
        shuffle_buffer_size=1000 custom_dataset_info download_mode=reuse_dataset_if_exists columns
        remove_unused_columns=true""",
    ),
    Unbuilt(
        "Other templates",
        "leave it out: rows become text by the template of Qwen3-VL; a system prompt is a message of the row",
        """template=qwen3_vl system agent_template norm_bbox use_chat_template=true padding_side=right
        loss_scale=default template_backend=swift response_prefix enable_thinking
        add_non_thinking_prefix=true model_name model_author new_special_tokens""",
    ),
    Unbuilt("Length", "use --max_length", "seq_length"),
    Unbuilt(
        "Image size",
        "set IMAGE_MAX_TOKEN_NUM in the environment; a token is 1024 pixels",
        "max_pixels model_kwargs",
    ),
    Unbuilt(
        "Other tasks",
        "leave it out: landfall sft is supervised fine-tuning of a causal language model",
        """rlhf_type task_type=causal_lm num_labels problem_type enable_dft_loss=false
        enable_channel_loss=false mtp_num_layers ref_model ref_load ref_adapters
        calculate_per_token_loss=true external_plugins custom_register_path callbacks use_ray=false""",
    ),
    Unbuilt(
        "Architecture",
        "leave it out: the model's config.json decides",
        """num_layers hidden_size ffn_hidden_size num_attention_heads kv_channels num_query_groups
        group_query_attention max_position_embeddings max_model_len rope_scaling position_embedding_type
        rotary_base rotary_percent=1 normalization=RMSNorm norm_epsilon swiglu qk_layernorm add_qkv_bias
        untie_embeddings_and_output_weights disable_bias_linear attention_dropout=0 hidden_dropout=0
        padded_vocab_size initialize_embedding=false language_model_only=false""",
    ),
    Unbuilt(
        "Precision",
        "use --bf16 true or false",
        """fp16=false torch_dtype apply_query_key_layer_scaling=false fp8_format fp8_recipe=delayed
        fp8_amax_history_len=1024 fp8_amax_compute_algo=max fp8_param_gather=false fp4_format""",
    ),
    Unbuilt(
        "Kernels",
        "leave it out: landfall chooses the kernels; --attention_backend chooses the attention's",
        """no_masked_softmax_fusion=false no_bias_dropout_fusion=false no_bias_swiglu_fusion=false
        no_rope_fusion=true no_gradient_accumulation_fusion=false masked_softmax_fusion=true
        bias_dropout_fusion=true bias_activation_fusion=true apply_rope_fusion=false
        gradient_accumulation_fusion=true cross_entropy_fusion_impl=native use_flash_attn=false attn_impl
        vit_attn_impl transformer_impl=transformer_engine mlp_padding_free=false recompute_modules=core_attn
        gradient_checkpointing_kwargs vit_gradient_checkpointing_kwargs deterministic_mode=false
        use_cpu_initialization=false manual_gc=false manual_gc_interval=0 manual_gc_steps=0""",
    ),
    Unbuilt(
        "Groups of ranks",
        "leave it out: NCCL where there are GPUs, gloo elsewhere; the time limit is "
        "--distributed_timeout_minutes",
        "distributed_backend=nccl ddp_backend=nccl ddp_timeout=18000000 local_rank",
    ),
    Unbuilt(
        "Hubs",
        "set USE_HF=1 or HF_TOKEN in the environment; of another revision give the folder",
        "use_hf=false hub_token model_revision",
    ),
    Unbuilt(
        "Arguments",
        "write the flags out; those that landfall does not have are named one by one",
        """config ignore_args_error=false megatron_extra_kwargs extra_megatron_kwargs check_model=true
        bridge_backend=mcore-bridge""",
    ),
    Unbuilt(
        "Flags of swift sft",
        "use those of megatron sft: --micro_batch_size, --global_batch_size, --lr, --lr_warmup_fraction, "
        "--train_iters, --clip_grad, --no_save_optim, --recompute_granularity",
        """per_device_train_batch_size per_device_eval_batch_size gradient_accumulation_steps learning_rate
        warmup_ratio max_steps max_grad_norm save_only_model gradient_checkpointing lr_scheduler_type
        eval_strategy deepspeed""",
    ),
)


def asks_for_nothing(passing: Sequence[str], texts: Sequence[str]) -> bool:
    """Whether ``texts``, as given on the command line, are one of the ``passing`` values of a flag."""
    if not texts:
        return "true" in passing
    return len(texts) == 1 and (texts[0].lower() in NONE or any(_equal(value, texts[0]) for value in passing))


def _equal(value: str, text: str) -> bool:
    if value in ("true", "false"):
        return text.lower() in (YES if value == "true" else NO)
    try:
        return float(text) == float(value)
    except ValueError:
        return text == value
