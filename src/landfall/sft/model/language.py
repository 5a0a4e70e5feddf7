"""The language model: megatron-core's GPTModel from hidden states to losses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from landfall.sft.model.attention import Rows
from landfall.sft.model.loss import VocabShard, fused_losses, plain_losses
from landfall.sft.model.rotary import InterleavedRotary
from landfall.sft.model.specs import block_spec


class Deepstack(NamedTuple):
    """What the first layers add to the image tokens."""

    features: Tensor
    """[levels, V, H]"""
    positions: Tensor
    """[V] int64, among the tokens of this rank"""


class LanguageModel(GPTModel):
    """Takes embedded tokens [T, 1, H] on the first pipeline stage; gives the losses on the last.

    ``vocab_size`` is the number of tokens, ``vocab_rows`` what the embedding has with padding.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        vocab_size: int,
        vocab_rows: int,
        max_sequence_length: int,
        rotary_base: float,
        mrope_section: Sequence[int],
        tied: bool,
        pre_process: bool,
        post_process: bool,
    ) -> None:
        super().__init__(
            config=config,
            transformer_layer_spec=block_spec(config),
            vocab_size=vocab_rows,
            max_sequence_length=max_sequence_length,
            pre_process=pre_process,
            post_process=post_process,
            share_embeddings_and_output_weights=tied,
            position_embedding_type="none",
            scatter_embedding_sequence_parallel=False,
        )
        self.rotary = InterleavedRotary(config.kv_channels, rotary_base, mrope_section)
        if post_process:
            _become_head(self.output_layer, vocab_size)

    def embed(self, input_ids: Tensor) -> Tensor:
        """[T] -> [T, 1, H], on every tensor-parallel rank the whole."""
        return self.embedding(input_ids=input_ids.unsqueeze(0), position_ids=None)

    def forward(
        self,
        embedded: Tensor | None,
        rows: Rows,
        deepstack: Deepstack | None,
        labelled: Tensor,
        labels: Tensor | None,
    ) -> Tensor:
        """The losses [N] of the tokens at positions ``labelled`` [N], their logits if ``labels`` is None;
        the hidden states of this stage where more stages follow."""
        hidden = self.decoder(
            hidden_states=embedded,
            attention_mask=None,
            packed_seq_params=rows,
            context=None if deepstack is None else deepstack.features,
            context_mask=None if deepstack is None else deepstack.positions,
        )
        if not self.post_process:
            return hidden
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=False, group=self.pg_collection.tp
            )
        tied = self.share_embeddings_and_output_weights
        weight = self.shared_embedding_or_output_weight() if tied else None
        return self.output_layer(hidden.squeeze(1).index_select(0, labelled), weight, labels)


class Head(ColumnParallelLinear):
    """megatron-core's output layer that goes on to the losses, so that not all logits need to exist."""

    vocab_size: int

    def forward(self, hidden: Tensor, weight: Tensor | None, labels: Tensor | None) -> Tensor:
        """``hidden`` [N, H] -> losses [N] float32; logits [N, vocabulary] if ``labels`` is None."""
        weight = self.weight if weight is None else weight
        hidden = copy_to_tensor_model_parallel_region(hidden, group=self.tp_group)
        if labels is None:
            return self._all_logits(hidden, weight)
        losses = fused_losses if self.config.cross_entropy_loss_fusion else plain_losses
        return losses(hidden, weight, labels, self._shard(weight))

    def _shard(self, weight: Tensor) -> VocabShard:
        first = self.tp_group.rank() * weight.shape[0]
        return VocabShard(first, max(0, min(weight.shape[0], self.vocab_size - first)), self.tp_group)

    def _all_logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        logits = torch.nn.functional.linear(hidden, weight)
        if self.tp_group.size() > 1:
            shards = [torch.empty_like(logits) for _ in range(self.tp_group.size())]
            torch.distributed.all_gather(shards, logits.contiguous(), group=self.tp_group)
            logits = torch.cat(shards, dim=-1)
        return logits[:, : self.vocab_size]


def _become_head(output_layer: Any, vocab_size: int) -> None:
    """GPTModel names the class of its output layer; ours adds no state to it, so it can become ours."""
    output_layer.__class__ = Head
    output_layer.vocab_size = vocab_size
