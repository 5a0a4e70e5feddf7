#!/usr/bin/env bash
# Supervised fine-tuning of Qwen3-VL on one node: the reported script, with `megatron` replaced by `landfall`.
# What changes from run to run stands at the top; the environment wins, as in `LR=2e-5 bash THIS_SCRIPT`.
set -euo pipefail

MODEL=${MODEL:-Qwen3-VL-4B-Instruct}  # a Hugging Face folder
SFT_DATASET=${SFT_DATASET:?set SFT_DATASET to a jsonl file of messages and images}
SFT_DIR=${SFT_DIR:?set SFT_DIR to the folder that checkpoints go to}
NPROC_PER_NODE=${NPROC_PER_NODE:-8}  # ranks, one for each GPU
MICRO_BATCH_SIZE=${MICRO_BATCH_SIZE:-16}  # rows that a rank holds at a time
GLOBAL_BATCH_SIZE=${GLOBAL_BATCH_SIZE:-128}  # rows in a step, over all ranks
LR=${LR:-1e-5}
MAX_EPOCHS=${MAX_EPOCHS:-1}
SAVE_INTERVAL=${SAVE_INTERVAL:-10000}  # steps
EVAL_INTERVAL=${EVAL_INTERVAL:-10000}  # steps
NUM_WORKERS=${NUM_WORKERS:-4}  # processes that prepare rows, for each rank
DATASET_NUM_PROC=${DATASET_NUM_PROC:-8}  # processes that read the dataset, once

# As many devices as ranks (the reported script listed nine for eight).
export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-$(seq -s, 0 $((NPROC_PER_NODE - 1)))}
export NPROC_PER_NODE
export PYTORCH_CUDA_ALLOC_CONF='expandable_segments:True'
export IMAGE_MAX_TOKEN_NUM=1600

arguments=(
    --model "$MODEL"
    --model_type qwen3_vl
    --load_safetensors true
    --save_safetensors true
    --context_parallel_size 1
    --tensor_model_parallel_size 1
    --pipeline_model_parallel_size 1
    --dataset "$SFT_DATASET"
    --split_dataset_ratio 0.01
    --load_from_cache_file true
    --bf16 true
    --attention_softmax_in_fp32 true
    --attention_backend flash
    --sequence_parallel false
    --packing false
    --freeze_llm false
    --freeze_vit false
    --freeze_aligner false
    --micro_batch_size "$MICRO_BATCH_SIZE"
    --global_batch_size "$GLOBAL_BATCH_SIZE"
    --recompute_granularity full
    --recompute_method uniform
    --recompute_num_layers 1
    --finetune true
    --cross_entropy_loss_fusion true
    --train_type full
    --lr "$LR"
    --lr_warmup_fraction 0.05
    --min_lr 1e-8
    --max_epochs "$MAX_EPOCHS"
    --clip_grad 1.0
    --save "$SFT_DIR"
    --save_interval "$SAVE_INTERVAL"
    --eval_interval "$EVAL_INTERVAL"
    --vit_gradient_checkpointing true
    --max_length 4096
    --num_workers "$NUM_WORKERS"
    --no_save_optim true
    --no_save_rng true
    --dataset_num_proc "$DATASET_NUM_PROC"
)

landfall sft "${arguments[@]}"
