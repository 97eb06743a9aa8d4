"""What a policy trainer is told: the reinforcement method object, with its algorithm's preset filled in."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from upweight.errors import ConfigError
from upweight.ops.policy_loss import KL_ESTIMATORS

CHOICES: dict[str, tuple[str, ...]] = {
    "advantage": ("given", "group"),
    "lr_schedule": ("constant", "linear", "cosine"),
    "correction": ("none", "truncated"),
    "kl_estimator": tuple(KL_ESTIMATORS),
}

# Name → (least, whether the least itself is allowed, greatest).
RANGES: dict[str, tuple[float, bool, float]] = {
    "learning_rate": (0, True, math.inf),
    "warmup_steps": (0, True, math.inf),
    "total_steps": (1, True, math.inf),
    "batch_size": (1, True, math.inf),
    "weight_decay": (0, True, math.inf),
    "max_grad_norm": (0, False, math.inf),
    "adam_b1": (0, True, 1),
    "adam_b2": (0, True, 1),
    "epochs": (1, True, math.inf),
    "minibatch_size": (1, True, math.inf),
    "beta": (0, True, math.inf),
    "entropy_coeff": (0, True, math.inf),
    "is_cap": (0, False, math.inf),
    "max_response_length": (1, True, math.inf),
    "clip_low": (0, False, 1),
    "clip_high": (0, False, math.inf),
    "dual_clip": (1, False, math.inf),
    "rank": (1, True, math.inf),
    "alpha": (0, False, math.inf),
}


def check_fields(values: Mapping[str, Any]) -> None:
    """`ConfigError` naming field, value and what is allowed, for the first value outside `CHOICES` or `RANGES`."""
    for name, value in values.items():
        if name in CHOICES and value not in CHOICES[name]:
            raise ConfigError(f"{name} {value!r} is not offered; offered: {', '.join(CHOICES[name])}")
        if name in RANGES and value is not None:
            least, inclusive, greatest = RANGES[name]
            # Written so that NaN fails; the greatest value is always left out.
            if not ((least <= value if inclusive else least < value) and value < greatest):
                start = f"[{least}" if inclusive else f"({least}"
                raise ConfigError(f"{name} {value!r} is out of range; allowed: {start}, {greatest})")


@dataclass(frozen=True, kw_only=True)
class Preset:
    """One row of the table of methods."""

    loss: str = "clip"
    aggregation: str = "token_mean"
    advantage: str = "group"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    kl_estimator: str = "k3"

    def __post_init__(self) -> None:
        check_fields({name: getattr(self, name) for name in ("clip_low", "clip_high", "dual_clip", "kl_estimator")})


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

    def __post_init__(self) -> None:
        check_fields(asdict(self))

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
    total_steps: int | None = None  # batches of the whole job
    batch_size: int | None = None  # samples a batch
    weight_decay: float = 0.0
    max_grad_norm: float | None = 1.0  # None = gradients are not clipped
    adam_b1: float = 0.9
    adam_b2: float = 0.95
    epochs: int = 1
    minibatch_size: int | None = None
    beta: float = 0.0
    entropy_coeff: float = 0.0
    correction: str = "truncated"
    is_cap: float = 2.0
    max_response_length: int = 256
    lora: LoraSettings | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_fields({field.name: getattr(self, field.name) for field in fields(self)})

    @property
    def updates_per_batch(self) -> int:
        """Optimizer updates made from a full batch."""
        parts = -(-self.batch_size // self.minibatch_size) if self.batch_size and self.minibatch_size else 1
        return self.epochs * parts

    @classmethod
    def from_method(cls, method: Mapping[str, Any]) -> PolicySettings:
        """Reads a reinforcement method object; `ConfigError` for what this trainer does not offer."""
        algorithm = method.get("algorithm", "grpo")
        if algorithm not in PRESETS:
            raise ConfigError(f"algorithm {algorithm!r} is not offered; offered: {', '.join(PRESETS)}")
        if method.get("mask_truncated"):
            raise ConfigError("mask_truncated true is not offered by this trainer; mask such samples in the rollout")
        overrides = {
            k: method[k] for k in ("clip_low", "clip_high", "dual_clip", "kl_estimator") if method.get(k) is not None
        }
        own = {field.name for field in fields(cls)} - {
            "algorithm",
            "preset",
            "lora",
            "total_steps",
            "max_response_length",
        }
        given = {name: method[name] for name in own if method.get(name) is not None}
        if "max_grad_norm" in method:
            given["max_grad_norm"] = method["max_grad_norm"]
        lora = method.get("lora")
        unknown = set(lora or {}) - {field.name for field in fields(LoraSettings)}
        if unknown:
            raise ConfigError(f"lora.{min(unknown)} is not known; known: rank, alpha, targets")
        sampling = method.get("sampling") or {}
        return cls(
            algorithm=algorithm,
            preset=replace(PRESETS[algorithm], **overrides),
            lora=LoraSettings(**lora) if lora is not None else None,
            total_steps=method.get("num_batches"),
            max_response_length=int(sampling.get("max_tokens") or 256),
            **given,
        )
