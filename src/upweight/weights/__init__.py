"""Reads and writes parameters: safetensors, GGUF, checkpoints, versions."""
