"""What the fields of the trainers' configs may hold. A field of one name means the same in every config."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any, NamedTuple

import numpy as np

from upweight.errors import ConfigError
from upweight.ops.policy_loss import AGGREGATIONS, KL_ESTIMATORS


class Range(NamedTuple):
    """From `least` to `greatest`; each end is allowed or not. None is allowed where a field's type says so."""

    least: float
    greatest: float = math.inf
    with_least: bool = True
    with_greatest: bool = False

    def __contains__(self, value: object) -> bool:
        """Written so that NaN is in no range, and that no boolean or text passes for a number."""
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        above = self.least <= value if self.with_least else self.least < value
        below = value <= self.greatest if self.with_greatest else value < self.greatest
        return above and below

    def __str__(self) -> str:
        return f"{'[' if self.with_least else '('}{self.least}, {self.greatest}{']' if self.with_greatest else ')'}"


UNIT = Range(0, 1, with_greatest=True)
POSITIVE = Range(0, with_least=False)
NOT_NEGATIVE = Range(0)

RANGES: dict[str, Range] = {
    "gamma": UNIT,
    "gae_lambda": UNIT,
    "clip_param": Range(0, 1, with_least=False),  # the lower end of the clip range is 1 − clip_param
    "clip_param_high": POSITIVE,
    "dual_clip": Range(1, with_least=False),
    "value_clip": POSITIVE,
    "target_kl": POSITIVE,
    "cispo_max": POSITIVE,
    "is_cap": POSITIVE,
    "beta": NOT_NEGATIVE,
    "entropy_coeff": NOT_NEGATIVE,
    "vf_coeff": NOT_NEGATIVE,
    "kl_coeff": NOT_NEGATIVE,
    "simpo_gamma": NOT_NEGATIVE,
    "label_smoothing": Range(0, 0.5),
    "max_grad_norm": POSITIVE,
    "num_generations": Range(1),
    "std_ddof": Range(0, 1, with_greatest=True),
    "max_response_length": Range(1),
    "overlong_length": Range(1),
    "overlong_buffer": Range(0),
}
INTEGERS = ("num_generations", "std_ddof", "max_response_length", "overlong_length", "overlong_buffer")
CHOICES: dict[str, tuple[str, ...]] = {
    "baseline": ("none", "loo", "batch"),
    "loss_aggregation": tuple(AGGREGATIONS),
    "kl_estimator": ("exact", *KL_ESTIMATORS),
    "ratio_level": ("token", "sequence", "sequence_sum"),
    "policy_loss": ("clip", "cispo", "reinforce"),
    "advantage": ("group", "rloo", "reinforce_pp", "reinforce_pp_baseline", "returns"),
    "scale_rewards": ("group", "batch", "none"),
    "is_mask_level": ("token", "sequence"),
    "proximal": ("batch", "recomputed"),
    "overlong": ("none", "mask", "soft"),
    "loss_type": ("sigmoid", "ipo", "hinge", "robust", "simpo"),
}


def check_config(config: Any) -> None:
    """`ConfigError` (a ValueError) naming field, value and range, for the first field outside what it may hold."""
    name = type(config).__name__
    for field in fields(config):
        value = getattr(config, field.name)
        if isinstance(
            value, np.generic
        ):  # a number of numpy becomes Python's, so that configs compare and can be written
            value = value.item()
            setattr(config, field.name, value)
        if value is None and "None" in str(field.type):
            continue
        if isinstance(field.default, bool):
            if not isinstance(value, bool):
                raise ConfigError(f"{name}.{field.name} is {value!r}; it must be True or False")
        elif field.name in CHOICES and value not in CHOICES[field.name]:
            raise ConfigError(f"{name}.{field.name} is {value!r}; it must be one of {', '.join(CHOICES[field.name])}")
        elif field.name in RANGES:
            allowed = RANGES[field.name]
            if value not in allowed or (field.name in INTEGERS and not isinstance(value, int)):
                kind = "an integer" if field.name in INTEGERS else "a number"
                raise ConfigError(f"{name}.{field.name} is {value!r}; it must be {kind} in {allowed}")
