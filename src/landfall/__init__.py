"""Supervised fine-tuning of Qwen3-VL on megatron-core, with checkpoints that always land."""

__version__ = "0.1.0"
