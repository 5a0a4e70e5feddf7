"""Qwen3-VL on megatron-core: transformers' vision tower in front of a GPTModel."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.enums import ModelType
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

from landfall.sft.data.batch import MicroBatch
from landfall.sft.model.attention import Rows
from landfall.sft.model.inputs import ImageTokens, Inputs, Sharing, prepare
from landfall.sft.model.language import Deepstack, LanguageModel
from landfall.sft.model.vision import ImageFeatures, blank_image, look


class Qwen3VLModel(MegatronModule):
    """One pipeline stage. ``visual`` lives on the first stage only, whole on every tensor-parallel rank."""

    def __init__(
        self,
        config: TransformerConfig,
        language_model: LanguageModel,
        visual: Qwen3VLVisionModel | None,
        image_ids: tuple[int, ...],
        merge: int,
    ) -> None:
        super().__init__(config)
        if visual is not None:
            self.visual = visual
        self.language_model = language_model
        self.image_ids, self.merge = image_ids, merge
        # What megatron-core's schedules, DDP and gradient finalization ask of a model:
        self.model_type = ModelType.encoder_or_decoder
        self.pre_process, self.post_process = language_model.pre_process, language_model.post_process
        self.share_embeddings_and_output_weights = language_model.share_embeddings_and_output_weights

    def forward(self, batch: MicroBatch) -> Tensor:
        """[N] float32, the loss of each token of ``batch`` (host or device) that has a label, in order; the
        hidden states where more pipeline stages follow. With context parallelism: of this rank's tokens."""
        return self._run(batch, with_labels=True)

    def logits(self, batch: MicroBatch) -> Tensor:
        """[T, vocabulary], of all tokens of this context-parallel rank, padding included."""
        return self._run(batch, with_labels=False)

    def set_input_tensor(self, input_tensor: Any) -> None:
        self.language_model.set_input_tensor(input_tensor)

    def shared_embedding_or_output_weight(self) -> Tensor | None:
        return self.language_model.shared_embedding_or_output_weight()

    def _run(self, batch: MicroBatch, with_labels: bool) -> Tensor:
        device = self.language_model.rotary.axes.device
        inputs = prepare(batch, self.image_ids, self.merge, self._sharing(), device)
        angles = self.language_model.rotary(inputs.position_ids, self.config.params_dtype)
        rows = Rows.of(
            inputs.query_lengths,
            device,
            key_lengths=inputs.key_lengths,
            first_key=inputs.first_key,
            angles=angles,
        )
        embedded, deepstack = self._embed(inputs) if self.pre_process else (None, None)
        if with_labels:
            return self.language_model(embedded, rows, deepstack, inputs.labelled, inputs.labels)
        everything = torch.arange(len(inputs.input_ids), device=device)
        return self.language_model(embedded, rows, deepstack, everything, None)

    def _sharing(self) -> Sharing:
        context = parallel_state.get_context_parallel_group()
        if not self.config.sequence_parallel:
            return Sharing(context.rank(), context.size())
        tensor = self.language_model.tp_group
        return Sharing(context.rank(), context.size(), tensor.rank(), tensor.size())

    def _embed(self, inputs: Inputs) -> tuple[Tensor, Deepstack | None]:
        features = self._look(inputs)  # in the order of the parameters, in which DDP gathers them
        embedded = self.language_model.embed(inputs.input_ids)
        deepstack = None
        if features is not None:
            embedded = _put(features.tokens, embedded, inputs.images)
            if features.deepstack is not None:
                deepstack = self._deepstack(features.deepstack, inputs.layer_images)
        if self.config.sequence_parallel:
            embedded = scatter_to_sequence_parallel_region(embedded, group=self.language_model.tp_group)
        return embedded, deepstack

    def _look(self, inputs: Inputs) -> ImageFeatures | None:
        """A trainable tower runs on every micro batch, so that all ranks take part in what DDP does with its
        parameters: without images it sees a blank one, which :func:`_put` and deepstack multiply by zero."""
        trained = any(parameter.requires_grad for parameter in self.visual.parameters())
        if inputs.pixel_values is not None and inputs.grid_thw is not None:
            with contextlib.nullcontext() if trained else torch.no_grad():
                return look(self.visual, inputs.pixel_values, inputs.grid_thw)
        return look(self.visual, *blank_image(self.visual)) if trained else None

    def _deepstack(self, features: Tensor, images: ImageTokens) -> Deepstack:
        if self.config.sequence_parallel:
            # each tensor-parallel rank adds other features, so their gradients are summed over the ranks
            features = copy_to_tensor_model_parallel_region(features, group=self.language_model.tp_group)
        if images.count == 0:
            return Deepstack(features[:, :1] * 0, images.positions.new_zeros(1))
        return Deepstack(features[:, images.first : images.first + images.count], images.positions)


def _put(features: Tensor, embedded: Tensor, images: ImageTokens) -> Tensor:
    """``embedded`` [t, 1, H] with the image tokens replaced by their features; where there are none, only
    tied to the features by zero gradients."""
    if images.count == 0:
        return embedded + features[0] * 0
    taken = features[images.first : images.first + images.count]
    return embedded.index_copy(0, images.positions, taken.unsqueeze(1))
