"""Configs of the typed-batch trainers, checked when made and again when a trainer is built from one.

A field that none of the fields before it needs is off by default. `max_grad_norm` None leaves gradients unclipped.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from upweight.errors import ConfigError
from upweight.training.rl.ranges import Range, check_config


@dataclass(slots=True)
class REINFORCEConfig:
    gamma: float = 0.99  # 1.0 is the usual choice for rewards at the end
    normalize_returns: bool = True  # whiten the returns over the batch
    entropy_coeff: float = 0.01
    baseline: str = "none"  # none | loo: less the mean of the others of the group | batch: less the mean of the batch
    loss_aggregation: str = "token_mean"
    max_grad_norm: float | None = None

    def __post_init__(self) -> None:
        check_config(self)
        _check_no_norm(self.loss_aggregation)


@dataclass(slots=True)
class PPOConfig:
    gamma: float = 0.99
    gae_lambda: float = 0.95
    clip_param: float = 0.2
    vf_coeff: float = 0.5  # of the plain squared error: 0.5 here is 1.0 where the error is halved
    entropy_coeff: float = 0.01
    max_grad_norm: float | None = 0.5
    clip_param_high: float | None = None  # None = clip_param
    dual_clip: float | None = None  # c > 1: for a negative advantage the loss is at most c·|Â|
    value_clip: float | None = None  # values may move this far from the old ones
    target_kl: float | None = None  # the update is skipped when approx_kl is greater
    kl_coeff: float = 0.0  # of the KL to the batch's reference_log_probs
    kl_estimator: str = "k1"
    loss_aggregation: str = "token_mean"
    whiten_advantages: bool = True

    def __post_init__(self) -> None:
        check_config(self)
        if self.kl_estimator == "exact":
            raise ConfigError("PPOConfig.kl_estimator is 'exact'; log-probs of a batch allow k1, k2 and k3 only")
        _check_no_norm(self.loss_aggregation)


@dataclass(slots=True)
class GRPOConfig:
    num_generations: int = 4  # the batch's group_size decides; a different one is warned of
    clip_param: float = 0.2
    beta: float = 0.01  # of the KL to the reference in the loss
    entropy_coeff: float = 0.01
    clip_param_high: float | None = None  # None = clip_param
    dual_clip: float | None = None
    ratio_level: str = "token"  # token | sequence: exp(mean log-ratio) | sequence_sum: exp(Σ log-ratio)
    policy_loss: str = "clip"  # clip | cispo | reinforce: no ratio
    cispo_max: float = 5.0
    # group | rloo | reinforce_pp: whitened token returns | reinforce_pp_baseline | returns: token returns as they are
    advantage: str = "group"
    scale_rewards: str = "group"  # what `group` advantages are divided by: the std of the group, of the batch, nothing
    std_ddof: int = 0  # 0 = population, 1 = sample std
    loss_aggregation: str = "token_mean"
    max_response_length: int | None = None  # the constant of seq_mean_token_sum_norm
    kl_estimator: str = "exact"
    is_cap: float | None = None  # tokens weigh min(π_old/π_sampler, is_cap)
    max_grad_norm: float | None = None
    is_mask: tuple[float, float] | None = None  # what lies outside this band of π_old/π_sampler is left out
    is_mask_level: str = "token"  # token | sequence: by exp(mean log-ratio) of the whole sequence
    proximal: str = "batch"  # where the clip is centred: at old_log_probs | recomputed: at the policy before the update
    kl_in_reward: bool = False  # rewards are lowered by kl_coeff·(log π_old − log π_ref)
    kl_coeff: float = 0.0
    filter_flat_groups: bool = False  # a group of equal rewards leaves numerator and denominator of every mean
    overlong: str = "none"  # none | mask: answers of overlong_length tokens are not trained | soft: punished (DAPO)
    overlong_length: int | None = None
    overlong_buffer: int = 0  # soft: the punishment grows from 0 to 1 over the last so many tokens

    def __post_init__(self) -> None:
        check_config(self)
        if self.is_mask is not None:
            self.is_mask = _band(self.is_mask)
        if self.overlong != "none" and self.overlong_length is None:
            raise ConfigError(f"GRPOConfig.overlong is {self.overlong!r} and overlong_length None; give the length")
        if self.overlong == "soft" and not 1 <= self.overlong_buffer <= (self.overlong_length or 0):
            raise ConfigError(
                f"GRPOConfig.overlong_buffer is {self.overlong_buffer}; for overlong 'soft' it must be in "
                f"[1, {self.overlong_length}], the overlong_length"
            )

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> GRPOConfig:
        """The fields that make a published method of this family, with any of them replaced.

        `rloo`, `reinforce` and `reinforce_pp` take their KL in the reward: it is on once `kl_coeff` is set.
        """
        if name not in PRESETS:
            raise ConfigError(f"preset {name!r} is not known; known: {', '.join(PRESETS)}")
        return cls(**{"entropy_coeff": 0.0, "beta": 0.0, **PRESETS[name], **overrides})


PRESETS: dict[str, dict[str, Any]] = {
    "grpo": {"loss_aggregation": "seq_mean_token_mean", "beta": 0.04, "kl_estimator": "k3"},
    "bnpo": {},
    "dr_grpo": {"scale_rewards": "none", "loss_aggregation": "seq_mean_token_sum_norm"},
    "dapo": {"clip_param_high": 0.28, "filter_flat_groups": True},
    "gspo": {
        "ratio_level": "sequence",
        "loss_aggregation": "seq_mean_token_mean",
        "clip_param": 3e-4,
        "clip_param_high": 4e-4,
    },
    "cispo": {"policy_loss": "cispo"},
    "rloo": {
        "advantage": "rloo",
        "ratio_level": "sequence_sum",
        "loss_aggregation": "seq_mean_token_mean",
        "kl_estimator": "k1",
        "kl_in_reward": True,
    },
    "reinforce": {"advantage": "returns", "policy_loss": "reinforce", "kl_estimator": "k1", "kl_in_reward": True},
    "reinforce_pp": {"advantage": "reinforce_pp", "kl_estimator": "k1", "kl_in_reward": True},
    "reinforce_pp_baseline": {"advantage": "reinforce_pp_baseline", "kl_estimator": "k2"},
}


@dataclass(slots=True)
class DPOConfig:
    beta: float = 0.1
    label_smoothing: float = 0.0  # ε: how often the preference is believed to be wrong
    reference_free: bool = False
    loss_type: str = "sigmoid"  # sigmoid | ipo | hinge | robust | simpo
    length_normalized: bool = False  # scores are means instead of sums; always so for ipo and simpo
    simpo_gamma: float = 0.5
    precomputed_reference: bool = False  # batches bring reference_log_probs, no reference model is needed
    max_grad_norm: float | None = None

    def __post_init__(self) -> None:
        check_config(self)
        if self.loss_type == "ipo" and self.beta == 0:
            raise ConfigError("DPOConfig.beta is 0; the ipo loss needs a beta > 0")
        if self.label_smoothing and self.loss_type not in ("sigmoid", "robust"):
            raise ConfigError(
                f"DPOConfig.label_smoothing is {self.label_smoothing}; loss_type {self.loss_type!r} has none, "
                "use sigmoid or robust, or 0"
            )


@dataclass(slots=True)
class SFTConfig:
    max_grad_norm: float | None = None

    def __post_init__(self) -> None:
        check_config(self)


def _band(given: Any) -> tuple[float, float]:
    """Any pair as a tuple, so that configs of equal bands are equal."""
    items = given if isinstance(given, Iterable) else ()
    pair = tuple(x.item() if isinstance(x, np.generic) else x for x in items)
    if len(pair) == 2 and pair[0] in Range(0) and pair[1] in Range(pair[0]):
        return pair
    raise ConfigError(f"GRPOConfig.is_mask is {given!r}; it must be (low, high) with 0 ≤ low ≤ high")


def _check_no_norm(aggregation: str) -> None:
    if aggregation == "seq_mean_token_sum_norm":
        raise ConfigError(
            f"loss_aggregation {aggregation!r} needs a max_response_length, which only GRPOConfig has; use another one"
        )
