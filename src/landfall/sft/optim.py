"""Adam, and around it megatron-core's distributed optimizer and learning-rate schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch
from megatron.core import optimizer as megatron_optimizer
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import (
    MegatronOptimizer,
    OptimizerConfig,
    distrib_optimizer,
    get_megatron_optimizer,
)
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch.optim.adam import adam

from landfall.errors import UsageError
from landfall.sft.model.freeze import part_of
from landfall.sft.model.qwen3_vl import Qwen3VLModel


@dataclass(frozen=True)
class OptimizerOptions:
    """Fields are named as the flags."""

    lr: float
    train_iters: int
    global_batch_size: int
    min_lr: float = 0.0
    lr_decay_style: str = "cosine"
    lr_warmup_fraction: float | None = None
    """Of the iterations over which the rate decays; if None, ``lr_warmup_iters`` counts."""
    lr_warmup_iters: int = 0
    lr_decay_iters: int | None = None
    """``train_iters`` if None."""
    vit_lr: float | None = None
    """For the vision tower without its aligner; ``lr`` if None. Its minimum is scaled as it is."""
    aligner_lr: float | None = None
    weight_decay: float = 0.1
    """Not for biases and norms, as megatron-core has it."""
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    adam_eps: float = 1e-8
    clip_grad: float = 1.0
    bf16: bool = False
    use_distributed_optimizer: bool = True
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False


def wrap_ddp(model: Qwen3VLModel, options: OptimizerOptions) -> DistributedDataParallel:
    """Wrap a model whose frozen parts are frozen. Gradients are summed over the data-parallel ranks in
    float32 and divided by the global batch's number of labelled tokens. Every rank calls it."""
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=options.overlap_grad_reduce,
        overlap_param_gather=options.overlap_param_gather,
        use_distributed_optimizer=options.use_distributed_optimizer,
        check_for_nan_in_grad=False,  # train_step looks at the norm, on all ranks alike
    )
    wrapped = DistributedDataParallel(model.config, settings, model)
    model.config.finalize_model_grads_func = finalize_model_grads
    if options.overlap_grad_reduce:
        model.config.no_sync_func = wrapped.no_sync
    return wrapped


def build_optimizer(
    model: DistributedDataParallel, options: OptimizerOptions
) -> tuple[MegatronOptimizer, OptimizerParamScheduler]:
    """The optimizer of a model from :func:`wrap_ddp` and its scheduler. Every rank calls it."""
    install_optimizer()
    settings = OptimizerConfig(
        optimizer="adam",
        lr=options.lr,
        min_lr=options.min_lr,
        weight_decay=options.weight_decay,
        adam_beta1=options.adam_beta1,
        adam_beta2=options.adam_beta2,
        adam_eps=options.adam_eps,
        clip_grad=options.clip_grad,
        bf16=options.bf16,
        params_dtype=torch.bfloat16 if options.bf16 else torch.float32,
        use_distributed_optimizer=options.use_distributed_optimizer,
        overlap_param_gather=options.overlap_param_gather,
    )
    optimizer = get_megatron_optimizer(
        settings, [model], config_overrides=_overrides(settings, options), use_gloo_process_groups=False
    )
    return optimizer, build_scheduler(optimizer, options)


def allocate_state(optimizer: MegatronOptimizer) -> None:
    """Give every parameter its moments, as zeros, before the first step: what will not fit is known at start,
    and a checkpoint can be loaded into them."""
    for inner in getattr(optimizer, "chained_optimizers", [optimizer]):
        for group in inner.optimizer.param_groups if not inner.is_stub_optimizer else []:
            for parameter in group["params"]:
                for name in ("exp_avg", "exp_avg_sq"):
                    inner.optimizer.state[parameter].setdefault(name, torch.zeros_like(parameter))


def _overrides(settings: OptimizerConfig, options: OptimizerOptions) -> dict[Any, Any]:
    """megatron-core's own exceptions from the settings, and the rates of the parts that have one."""
    overrides = dict(megatron_optimizer.get_standard_config_overrides(settings))
    for part, rate in (("vit", options.vit_lr), ("aligner", options.aligner_lr)):
        if rate is not None:
            scale = rate / options.lr
            match = megatron_optimizer.optimizer_config.ParamWithNamePredicate(part, _is_in(part))
            # lr_mult only tells groups apart in checkpoints
            overrides[megatron_optimizer.ParamKey(with_name_predicate=match)] = {
                "max_lr": rate,
                "min_lr": options.min_lr * scale,
                "lr_mult": scale,
            }
    return overrides


def _is_in(part: str) -> Callable[[torch.Tensor, str], bool]:
    return lambda parameter, name: part_of(name.removeprefix("module.")) == part


def build_scheduler(
    optimizer: MegatronOptimizer, options: OptimizerOptions, num_rows: int = 0
) -> OptimizerParamScheduler:
    """The schedule that the flags say, at the point that it reaches after ``num_rows`` rows.

    Counts in rows, as Megatron does, so that a run can go on with another global batch size.
    """
    decay_rows = (options.lr_decay_iters or options.train_iters) * options.global_batch_size
    if options.lr_warmup_fraction is not None:
        warmup_rows: float = options.lr_warmup_fraction * decay_rows
    else:
        warmup_rows = options.lr_warmup_iters * options.global_batch_size
    if not 0 <= warmup_rows < decay_rows:
        raise UsageError(
            "the learning rate would still be warming up when its decay is over",
            got=f"warm-up over {warmup_rows:g} rows, decay until row {decay_rows}",
            do="lower lr_warmup_fraction or lr_warmup_iters",
        )
    if not 0 <= options.min_lr <= options.lr:
        raise UsageError(
            "min_lr must not be above lr",
            got=f"lr {options.lr:g}, min_lr {options.min_lr:g}",
            do="lower min_lr",
        )
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=options.lr,
        min_lr=options.min_lr,
        lr_warmup_steps=cast(int, warmup_rows),
        lr_decay_steps=decay_rows,
        lr_decay_style=options.lr_decay_style,
        start_wd=options.weight_decay,
        end_wd=options.weight_decay,
        wd_incr_steps=options.train_iters * options.global_batch_size,
        wd_incr_style="constant",
    )
    scheduler.step(increment=num_rows)
    return scheduler


class Adam(torch.optim.Optimizer):
    """Adam with decoupled weight decay, its state as Apex and TransformerEngine lay it out: ``step`` once in
    each parameter group, ``exp_avg`` and ``exp_avg_sq`` with each parameter that ever got a gradient.

    torch's own keeps a ``step`` tensor with each parameter; megatron-core's distributed optimizer loads one
    shared tensor into all of them, and the steps drift apart without a word.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.adam_w_mode = adam_w_mode

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step of the parameters that have a gradient. Uses torch's fused kernel, on the CPU too."""
        for group in self.param_groups:
            group["step"] = int(group.get("step", 0)) + 1
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if parameters:
                self._step(group, parameters)

    def _step(self, group: dict[str, Any], parameters: list[torch.Tensor]) -> None:
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter]["exp_avg"] = torch.zeros_like(parameter)
                self.state[parameter]["exp_avg_sq"] = torch.zeros_like(parameter)
        states = [self.state[parameter] for parameter in parameters]
        # the kernel counts each parameter's steps up by one
        before = torch.full((len(parameters),), float(group["step"] - 1), device=parameters[0].device)
        adam(
            parameters,
            [cast(torch.Tensor, parameter.grad) for parameter in parameters],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            list(before.unbind()),
            fused=True,
            decoupled_weight_decay=self.adam_w_mode,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def install_optimizer() -> None:
    """Let megatron-core use :class:`Adam` where neither Apex nor TransformerEngine is installed: on the
    branches that it has for those, which are the ones used in production."""
    if distrib_optimizer.HAVE_APEX_OR_TE:
        return
    megatron_optimizer.Adam = distrib_optimizer.Adam = Adam
    megatron_optimizer.USING_PYTORCH_OPTIMIZER = False
    distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_APEX_OPTIMIZER = True
