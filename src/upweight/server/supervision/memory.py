"""How many tokens a trainer may hold at once, from the memory that is free when a job starts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from upweight.server.home import model_bytes

FEWEST, MOST = 512, 8192
USABLE = 0.7  # of the free memory; the rest is for the engine's cache, compilation and neighbours
BYTES_PER_TOKEN = 512 * 1024  # activations of small models with rematerialisation, and a share of the logits
COPIES_FULL, COPIES_LORA = 5, 2  # parameters old and new, gradient, two moments; base and merged


def microbatch_tokens(free_bytes: int, model_path: Path, *, lora: bool, keeps_start: bool = False) -> int:
    """A power of two from 512 to 8192. `keeps_start`: the start model is held beside the one that is trained."""
    copies = COPIES_LORA if lora else COPIES_FULL + int(keeps_start)
    held = model_bytes(model_path) * copies
    fitting = int((free_bytes * USABLE - held) / BYTES_PER_TOKEN)
    return max(FEWEST, min(MOST, 1 << max(fitting, 1).bit_length() - 1))


def keeps_start(method_type: str, settings: Mapping[str, Any]) -> bool:
    """Whether a job's trainer holds the start model beside the one that it trains: for a KL, or as the reference of pairs."""
    if method_type == "reinforcement":
        return bool(settings["beta"] > 0)
    return method_type == "dpo" and settings["loss_type"] != "simpo"
