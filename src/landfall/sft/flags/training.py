"""Flags that say how long and how fast is trained, and how the work is spread over ranks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from landfall.sft.flags import spec

training_flag = partial(spec.flag, "Training")
optimizer_flag = partial(spec.flag, "Optimizer and learning rate")
parallel_flag = partial(spec.flag, "Parallelism")

BETA = spec.Check("a number from 0 to below 1", lambda value: 0 <= value < 1)


@dataclass(frozen=True)
class TrainingFlags:
    """Length, batch sizes, learning rate, optimizer, ranks."""

    max_epochs: int | None = training_flag(
        None,
        "How often the data is gone through. An epoch is floor(rows / (micro batch * data-parallel ranks)) "
        "micro batches of every rank; what is left over is not trained on. Goes before --train_iters.",
        aliases=("num_train_epochs",),
        check=spec.COUNT,
    )
    train_iters: int | None = training_flag(
        None,
        "How many steps are trained. Has no effect beside --max_epochs, as in ms-swift.",
        check=spec.COUNT,
        default_text="from --max_epochs",
    )
    micro_batch_size: int = training_flag(1, "Rows that a rank computes at a time.", check=spec.COUNT)
    global_batch_size: int = training_flag(
        16,
        "Rows in a step, over all ranks: a multiple of --micro_batch_size times the data-parallel ranks.",
        check=spec.COUNT,
    )
    seed: int = training_flag(
        42,
        "Decides the order of rows and what is set aside for validation.",
        check=spec.COUNT_OR_ZERO,
    )
    finetune: bool = training_flag(
        False,
        "With --load: take only the weights and begin at step 0. false goes on where the checkpoint ended: "
        "step, position in the data, optimizer and random state.",
    )
    lr: float = optimizer_flag(1e-5, "The highest learning rate.", check=spec.POSITIVE)
    min_lr: float = optimizer_flag(
        0.0, "The learning rate at the end of the decay, not above --lr.", check=spec.NOT_NEGATIVE
    )
    vit_lr: float | None = optimizer_flag(
        None, "Another highest learning rate for the vision tower.", check=spec.POSITIVE, default_text="--lr"
    )
    aligner_lr: float | None = optimizer_flag(
        None, "Another highest learning rate for the mergers.", check=spec.POSITIVE, default_text="--lr"
    )
    lr_warmup_fraction: float | None = optimizer_flag(
        None,
        "The share of all steps in which the learning rate rises to --lr. Instead of --lr_warmup_iters.",
        check=spec.RATIO,
    )
    lr_warmup_iters: int = optimizer_flag(
        0, "The number of steps in which the learning rate rises to --lr.", check=spec.COUNT_OR_ZERO
    )
    lr_decay_style: str = optimizer_flag(
        "cosine",
        "How the learning rate goes from --lr to --min_lr over the steps after the warmup.",
        choices=("cosine", "linear", "constant"),
    )
    weight_decay: float = optimizer_flag(0.1, "AdamW's weight decay.", check=spec.NOT_NEGATIVE)
    clip_grad: float = optimizer_flag(
        1.0,
        "The largest norm of all gradients; larger ones are scaled down. 0: no limit.",
        check=spec.NOT_NEGATIVE,
    )
    adam_beta1: float = optimizer_flag(0.9, "Adam's decay of the mean of the gradients.", check=BETA)
    adam_beta2: float = optimizer_flag(0.95, "Adam's decay of the mean of their squares.", check=BETA)
    adam_eps: float = optimizer_flag(1e-8, "Adam's epsilon.", check=spec.POSITIVE)
    tensor_model_parallel_size: int = parallel_flag(1, "Ranks that share each layer.", check=spec.COUNT)
    pipeline_model_parallel_size: int = parallel_flag(
        1, "Ranks that each hold some of the layers.", check=spec.COUNT
    )
    context_parallel_size: int = parallel_flag(1, "Ranks that share each row.", check=spec.COUNT)
    sequence_parallel: bool = parallel_flag(
        False,
        "Share the parts of a layer that tensor parallelism leaves whole. Off with one tensor-parallel rank.",
    )
    use_distributed_optimizer: bool = parallel_flag(
        True,
        "Spread the optimizer's state over the data-parallel ranks (ZeRO-1).",
        built=(True,),
        do="leave it out: the result is the same, and each rank needs less memory",
    )
    overlap_grad_reduce: bool = parallel_flag(
        False,
        "Reduce gradients while the backward pass still runs.",
        cpu="yes; the result is the same, and nothing gets faster",
    )
    overlap_param_gather: bool = parallel_flag(
        False,
        "Gather updated parameters while the forward pass already runs. Needs --overlap_grad_reduce.",
        cpu="yes; the result is the same, and nothing gets faster",
    )
    distributed_timeout_minutes: int = parallel_flag(
        300000, "How long a collective of the training may take before the run ends.", check=spec.COUNT
    )
