"""What a policy trainer is told: the reinforcement method object, with its algorithm's preset filled in."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, TypeVar

from upweight.errors import ConfigError
from upweight.ops.policy_loss import KL_ESTIMATORS

CHOICES: dict[str, tuple[str, ...]] = {
    "advantage": ("given", "group", "reward"),
    "lr_schedule": ("constant", "linear", "cosine"),
    "correction": ("none", "truncated", "masked", "decoupled"),
    "kl_estimator": ("exact", *KL_ESTIMATORS),
    "kind": ("value_head",),
}

ONE_INCLUDED = math.nextafter(1.0, 2.0)

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
    "overlong_buffer": (1, True, math.inf),
    "rank": (1, True, math.inf),
    "alpha": (0, False, math.inf),
    "gamma": (0, True, ONE_INCLUDED),
    "gae_lambda": (0, True, ONE_INCLUDED),
    "warmup_batches": (0, True, math.inf),
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
                end = "1]" if greatest == ONE_INCLUDED else f"{greatest})"
                raise ConfigError(f"{name} {value!r} is out of range; allowed: {start}, {end}")


@dataclass(frozen=True, kw_only=True)
class Preset:
    """One row of the table of methods."""

    loss: str = "clip"
    aggregation: str = "token_mean"
    advantage: str = "group"  # of `ADVANTAGES`, or of a terminal reward: returns | gae
    whiten: bool = False  # advantages that are made here are whitened over the batch's trained tokens
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    kl_estimator: str = "k3"
    kl_in_reward: bool = (
        False  # β·KL is taken off the reward that advantages are made of, instead of standing in the loss
    )
    mask_truncated: bool = False  # answers that the length limit cut are not trained
    filter_flat_groups: bool = False  # groups of equal rewards are not trained: they leave the means of the loss
    overlong_buffer: int | None = None  # over the last so many tokens before the limit a reward falls by 1 in all

    def __post_init__(self) -> None:
        names = ("clip_low", "clip_high", "dual_clip", "kl_estimator", "overlong_buffer")
        check_fields({name: getattr(self, name) for name in names})


PRESETS: dict[str, Preset] = {
    "grpo": Preset(aggregation="seq_mean_token_mean"),
    "bnpo": Preset(),
    "dr_grpo": Preset(aggregation="seq_mean_token_sum_norm", advantage="group_centered"),
    "dapo": Preset(clip_high=0.28, mask_truncated=True, filter_flat_groups=True),
    "gspo": Preset(loss="clip_sequence", aggregation="seq_mean_token_mean", clip_low=3e-4, clip_high=4e-4),
    "cispo": Preset(loss="cispo"),
    "rloo": Preset(
        loss="clip_sequence_sum",
        aggregation="seq_mean_token_sum",
        advantage="rloo",
        kl_estimator="k1",
        kl_in_reward=True,
    ),
    "reinforce": Preset(loss="reinforce", advantage="returns", kl_estimator="k1", kl_in_reward=True),
    "reinforce_pp": Preset(advantage="returns", whiten=True, kl_estimator="k1", kl_in_reward=True),
    "reinforce_pp_baseline": Preset(advantage="group_centered", whiten=True, kl_estimator="k2"),
    "ppo": Preset(advantage="gae", whiten=True, kl_estimator="k1", kl_in_reward=True),
}
FROM_REWARD = ("returns", "gae")  # estimators that take one terminal reward a sample
BASELINES = ("reinforce_pp_baseline",)  # whose own estimator of a terminal reward is its group formula


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
class CriticSettings:
    """A linear value head on the decoder's last hidden state, trained beside the policy."""

    kind: str = "value_head"
    learning_rate: float = 1e-5
    gamma: float = 1.0
    gae_lambda: float = 0.95
    warmup_batches: int = 0  # first batches that train the critic alone

    def __post_init__(self) -> None:
        check_fields(asdict(self))


@dataclass(frozen=True, kw_only=True)
class PolicySettings:
    """Settings of `PolicyTrainer`; names and meaning as in the method object of a job."""

    algorithm: str = "grpo"
    # given: rewards are advantages; group: the preset's own formula is applied; reward: the preset's estimator of returns
    advantage: str = "given"
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
    critic: CriticSettings | None = None  # of ppo
    seed: int = 0

    def __post_init__(self) -> None:
        check_fields({field.name: getattr(self, field.name) for field in fields(self)})
        own, allowed = self.preset.advantage, _advantages_of(self.algorithm, self.preset)
        if self.advantage not in allowed:
            choice = " or ".join(allowed)
            raise ConfigError(f"advantage {self.advantage!r} does not fit algorithm {self.algorithm!r}; use {choice}")
        if (self.critic is not None) != (own == "gae"):
            raise ConfigError("critic belongs to algorithm 'ppo', which needs one; give both or neither")
        buffer = self.preset.overlong_buffer
        if buffer is not None and buffer > self.max_response_length:
            raise ConfigError(f"overlong_buffer {buffer!r} exceeds sampling.max_tokens {self.max_response_length!r}")
        if self.correction == "masked" and self.is_cap < 1:
            raise ConfigError(f"is_cap {self.is_cap!r} leaves out every token with correction 'masked'; use 1 or more")

    @property
    def compares_groups(self) -> bool:
        """Whether a sample's advantage depends on the others of its group."""
        return self.advantage != "given" and self.preset.advantage not in FROM_REWARD

    @property
    def makes_advantages(self) -> bool:
        """Whether tokens of one sample may have different advantages, or ones that depend on the whole batch."""
        return self.advantage != "given" and (self.preset.whiten or self.preset.advantage in FROM_REWARD)

    @property
    def kl_in_loss(self) -> bool:
        return self.beta > 0 and not self.kl_in_reward

    @property
    def kl_in_reward(self) -> bool:
        """Only of a reward: what is given as an advantage stays as it is."""
        return self.beta > 0 and self.preset.kl_in_reward and self.advantage != "given"

    @property
    def exact_kl(self) -> bool:
        return self.beta > 0 and self.preset.kl_estimator == "exact"

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
        preset = replace(PRESETS[algorithm], **{k: method[k] for k in OF_PRESET if method.get(k) is not None})
        own = {field.name for field in fields(cls)} - READ_APART
        given = {name: method[name] for name in own if method.get(name) is not None}
        given.setdefault("advantage", _advantages_of(algorithm, preset)[0])
        if "max_grad_norm" in method:
            given["max_grad_norm"] = method["max_grad_norm"]
        sampling = method.get("sampling") or {}
        critic = {} if algorithm == "ppo" and method.get("critic") is None else method.get("critic")
        return cls(
            algorithm=algorithm,
            preset=preset,
            lora=_nested(LoraSettings, "lora", method.get("lora")),
            critic=_nested(CriticSettings, "critic", critic),
            total_steps=method.get("num_batches"),
            max_response_length=int(sampling.get("max_tokens") or 256),
            **given,
        )


# Fields of the method object that replace the preset's, and fields of the settings that are not read by their own name.
OF_PRESET = (
    "clip_low",
    "clip_high",
    "dual_clip",
    "kl_estimator",
    "mask_truncated",
    "filter_flat_groups",
    "overlong_buffer",
)
READ_APART = {"algorithm", "preset", "lora", "critic", "total_steps", "max_response_length"}

Nested = TypeVar("Nested", LoraSettings, CriticSettings)


def _nested(kind: type[Nested], name: str, given: Mapping[str, Any] | None) -> Nested | None:
    if given is None:
        return None
    known = [field.name for field in fields(kind)]
    if unknown := set(given) - set(known):
        raise ConfigError(f"{name}.{min(unknown)} is not known; known: {', '.join(known)}")
    return kind(**given)


def _advantages_of(algorithm: str, preset: Preset) -> tuple[str, ...]:
    """Which `advantage` an algorithm takes, its default first."""
    if preset.advantage in FROM_REWARD:
        return ("reward",)
    return ("given", "group", "reward") if algorithm in BASELINES else ("given", "group")
