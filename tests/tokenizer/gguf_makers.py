"""Writes small GGUF files, byte by byte as the format describes them."""

import struct
from pathlib import Path
from typing import Any


def gguf_text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def gguf_value(value: Any) -> bytes:
    """A metadata value with its type in front: text, bool, int (uint32), float (float32) or a list of one of them."""
    if isinstance(value, list):
        items = [gguf_value(item) for item in value]
        return struct.pack("<I", 9) + items[0][:4] + struct.pack("<Q", len(items)) + b"".join(i[4:] for i in items)
    if isinstance(value, str):
        return struct.pack("<I", 8) + gguf_text(value)
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    return struct.pack("<II", 4, value)


def write_gguf(path: Path, entries: dict[str, Any]) -> Path:
    body = b"".join(gguf_text(name) + gguf_value(value) for name, value in entries.items())
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, len(entries)) + body)
    return path


TOKENS = ["<|end|>", "<|eot|>", "<user>", *"abc123", "ab", "12", "123", "Ġ", "Ġa"]


def tokenizer_entries(pre: str) -> dict[str, Any]:
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [3, 3, 4] + [1] * (len(TOKENS) - 3),
        "tokenizer.ggml.merges": ["a b", "1 2", "12 3", "Ġ a"],
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.eot_token_id": 1,
    }
