"""Flags that say which model is trained, which parts of it, how it computes and what it recomputes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from landfall.sft.flags import spec

model_flag = partial(spec.flag, "Model")
memory_flag = partial(spec.flag, "Memory and kernels")


@dataclass(frozen=True)
class ModelFlags:
    """What is trained. ``bf16`` is None until the model's config.json has been read."""

    model: str = model_flag(
        "",
        "The model to start from: a folder with config.json and safetensors files, or the id of one on a "
        "hub (owner/name). A checkpoint-N folder that a run wrote is such a folder too. Ids are looked up "
        "on ModelScope if its package is installed, on Hugging Face if not or if USE_HF=1.",
        check=spec.MODEL,
        default_text="needed",
    )
    model_type: str | None = model_flag(
        None,
        "The architecture. It is read from config.json; given here too, the two must agree.",
        built=(None, "qwen3_vl"),
        do="landfall trains the dense Qwen3-VL models",
        default_text="from config.json",
    )
    load_safetensors: bool | None = model_flag(
        None,
        "Ignored, as in ms-swift since 3.12: the weights of --model are always read from its safetensors "
        "files. Accepted so that scripts run as they are.",
        cpu="no: ignored",
        gpu="no: ignored",
    )
    train_type: str = model_flag(
        "full",
        "What is trained: full is all parameters of the parts that aren't frozen.",
        aliases=("tuner_type",),
        choices=("full", "lora", "lora_llm"),
        built=("full",),
        do="pass --train_type full; to train less, freeze parts with --freeze_llm or --freeze_vit",
    )
    freeze_llm: bool = model_flag(False, "Keep the language model as it is.")
    freeze_vit: bool = model_flag(True, "Keep the vision tower as it is.")
    freeze_aligner: bool = model_flag(
        True, "Keep the mergers as they are, which map the vision tower's features to the language model's."
    )
    bf16: bool | None = model_flag(
        None,
        "Compute in bfloat16, with parameters and gradients of the optimizer in float32. false computes in "
        "float32.",
        default_text="true if config.json says bfloat16",
        cpu="yes; slower than float32 on many CPUs",
    )
    attention_softmax_in_fp32: bool = memory_flag(
        True,
        "Compute the softmax of the attention in float32.",
        built=(True,),
        do="leave it out: the softmax is always computed in float32, and costs nothing",
    )
    attention_backend: str = memory_flag(
        "flash",
        "Which attention kernel is used, in the language model and in the vision tower.",
        choices=("flash", "fused", "unfused", "local", "auto"),
        built=("flash", "auto"),
        do="leave it out: the attention is torch's, the flash kernel where it can be",
        cpu="no: the flash kernel is CUDA's; torch's scaled_dot_product_attention is used",
        gpu="yes, in bfloat16; in float32 torch's scaled_dot_product_attention is used",
    )
    cross_entropy_loss_fusion: bool = memory_flag(
        False,
        "Compute the loss from a part of the logits at a time, and once more in the backward pass: much "
        "less memory for a little more time.",
    )
    recompute_granularity: str | None = memory_flag(
        "selective",
        "What is computed again in the backward pass instead of being kept: full is whole layers of the "
        "language model (least memory, about a third more time), selective the core of the attention, none "
        "nothing.",
        choices=("full", "selective"),
    )
    recompute_method: str | None = memory_flag(
        None,
        "For --recompute_granularity full: uniform recomputes all layers, in units of "
        "--recompute_num_layers; block recomputes the first --recompute_num_layers layers and keeps the "
        "others.",
        choices=("uniform", "block"),
    )
    recompute_num_layers: int | None = memory_flag(
        None,
        "For --recompute_granularity full: the layers in a unit (uniform), or how many are recomputed "
        "(block).",
        check=spec.COUNT,
    )
    vit_gradient_checkpointing: bool = memory_flag(
        True,
        "Recompute the blocks of the vision tower in the backward pass instead of keeping their activations.",
    )
