"""Decoders as Flax NNX modules, LoRA."""
