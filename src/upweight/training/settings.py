"""What a policy trainer is told: the reinforcement method object, with its algorithm's preset filled in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from upweight.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Preset:
    """One row of the table of methods."""

    loss: str = "clip"
    aggregation: str = "token_mean"
    advantage: str = "group"
    clip_low: float = 0.2
    clip_high: float = 0.2
    kl_estimator: str = "k3"


PRESETS: dict[str, Preset] = {
    "grpo": Preset(aggregation="seq_mean_token_mean"),
    "bnpo": Preset(),
    "dr_grpo": Preset(aggregation="seq_mean_token_sum_norm", advantage="group_centered"),
    "dapo": Preset(clip_high=0.28),
    "gspo": Preset(loss="clip_sequence", aggregation="seq_mean_token_mean", clip_low=3e-4, clip_high=4e-4),
    "cispo": Preset(loss="cispo"),
    "rloo": Preset(loss="clip_sequence_sum", aggregation="seq_mean_token_sum", advantage="rloo", kl_estimator="k1"),
}


@dataclass(frozen=True, kw_only=True)
class LoraSettings:
    rank: int = 16
    alpha: float = 32.0
    targets: str = "all-linear"

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


@dataclass(frozen=True, kw_only=True)
class PolicySettings:
    """Settings of `PolicyTrainer`; names and meaning as in the method object of a job."""

    algorithm: str = "grpo"
    advantage: str = "given"  # given: rewards are advantages; group: the preset's own formula is applied
    preset: Preset = PRESETS["grpo"]
    learning_rate: float = 1e-5
    lr_schedule: str = "constant"
    warmup_steps: int = 0
    total_steps: int | None = None
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    adam_b1: float = 0.9
    adam_b2: float = 0.95
    epochs: int = 1
    minibatch_size: int | None = None
    beta: float = 0.0
    entropy_coeff: float = 0.0
    correction: str = "truncated"
    is_cap: float = 2.0
    mask_truncated: bool = False
    max_response_length: int = 256
    lora: LoraSettings | None = None
    seed: int = 0

    @classmethod
    def from_method(cls, method: Mapping[str, Any]) -> PolicySettings:
        """Reads a reinforcement method object; `ConfigError` for what this trainer does not offer."""
        algorithm = method.get("algorithm", "grpo")
        if algorithm not in PRESETS:
            raise ConfigError(f"algorithm {algorithm!r} is not offered; offered: {', '.join(PRESETS)}")
        overrides = {k: method[k] for k in ("clip_low", "clip_high", "kl_estimator") if method.get(k) is not None}
        own = {field.name for field in fields(cls)} - {"algorithm", "preset", "lora"}
        given = {name: method[name] for name in own if method.get(name) is not None}
        lora = method.get("lora")
        sampling = method.get("sampling") or {}
        return cls(
            algorithm=algorithm,
            preset=replace(PRESETS[algorithm], **overrides),
            lora=LoraSettings(**lora) if lora else None,
            total_steps=method.get("num_batches"),
            max_response_length=int(sampling.get("max_tokens") or 256),
            **given,
        )
