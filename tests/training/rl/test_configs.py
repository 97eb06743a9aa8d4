"""Defaults, presets and ranges of the trainers' configs."""

import math
from dataclasses import asdict
from typing import Any

import pytest

from upweight.errors import UpweightError
from upweight.training.rl.configs import PRESETS, DPOConfig, GRPOConfig, PPOConfig, REINFORCEConfig

MIRRORED: list[tuple[Any, dict[str, Any]]] = [
    (REINFORCEConfig, {"gamma": 0.99, "normalize_returns": True, "entropy_coeff": 0.01}),
    (
        PPOConfig,
        {
            "gamma": 0.99,
            "gae_lambda": 0.95,
            "clip_param": 0.2,
            "vf_coeff": 0.5,
            "entropy_coeff": 0.01,
            "max_grad_norm": 0.5,
        },
    ),
    (GRPOConfig, {"num_generations": 4, "clip_param": 0.2, "beta": 0.01, "entropy_coeff": 0.01}),
    (DPOConfig, {"beta": 0.1, "label_smoothing": 0.0, "reference_free": False}),
]


@pytest.mark.parametrize(("config", "defaults"), MIRRORED)
def test_mirrored_fields_come_first_with_their_defaults(config: Any, defaults: dict[str, Any]) -> None:
    made = asdict(config())
    assert list(made.items())[: len(defaults)] == list(defaults.items())
    assert not hasattr(config(), "__dict__")


def test_added_fields_are_off() -> None:
    added = asdict(GRPOConfig())
    for name in ("clip_param_high", "dual_clip", "is_cap", "is_mask", "max_grad_norm", "max_response_length"):
        assert added[name] is None
    assert added["kl_estimator"] == "exact"
    assert (added["kl_in_reward"], added["kl_coeff"], added["overlong"]) == (False, 0.0, "none")
    assert asdict(PPOConfig())["whiten_advantages"] is True


@pytest.mark.parametrize(
    ("config", "field", "value"),
    [
        (REINFORCEConfig, "gamma", 5),
        (REINFORCEConfig, "gamma", -0.1),
        (REINFORCEConfig, "gamma", math.nan),
        (REINFORCEConfig, "entropy_coeff", -1e-3),
        (REINFORCEConfig, "baseline", "mean"),
        (REINFORCEConfig, "normalize_returns", 1),
        (REINFORCEConfig, "loss_aggregation", "seq_mean_token_sum_norm"),
        (PPOConfig, "gae_lambda", 1.01),
        (PPOConfig, "clip_param", 0.0),
        (PPOConfig, "clip_param", 1.0),
        (PPOConfig, "clip_param", True),
        (PPOConfig, "clip_param", "0.2"),
        (PPOConfig, "clip_param_high", -0.2),
        (PPOConfig, "vf_coeff", -1),
        (PPOConfig, "max_grad_norm", -1.0),
        (PPOConfig, "max_grad_norm", 0),
        (PPOConfig, "dual_clip", 1.0),
        (PPOConfig, "value_clip", 0.0),
        (PPOConfig, "target_kl", 0.0),
        (PPOConfig, "kl_estimator", "exact"),
        (GRPOConfig, "beta", -0.01),
        (GRPOConfig, "beta", None),
        (GRPOConfig, "num_generations", 0),
        (GRPOConfig, "num_generations", 2.0),
        (GRPOConfig, "std_ddof", 2),
        (GRPOConfig, "ratio_level", "batch"),
        (GRPOConfig, "is_mask", (2.0, 0.5)),
        (GRPOConfig, "is_mask", (0.5,)),
        (GRPOConfig, "is_mask", 5),
        (GRPOConfig, "is_mask", ["a", 2]),
        (GRPOConfig, "overlong", "soft"),
        (GRPOConfig, "kl_estimator", "k4"),
        (DPOConfig, "beta", math.inf),
        (DPOConfig, "label_smoothing", 0.5),
        (DPOConfig, "loss_type", "kto"),
    ],
)
def test_c21_out_of_range(config: Any, field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=field) as caught:
        config(**{field: value})
    assert isinstance(caught.value, UpweightError)
    assert str(value) in str(caught.value)


def test_combinations_that_mean_nothing() -> None:
    with pytest.raises(ValueError, match=r"overlong_buffer is 9; .* in \[1, 8\]"):
        GRPOConfig(overlong="soft", overlong_length=8, overlong_buffer=9)
    with pytest.raises(ValueError, match="ipo loss needs a beta > 0"):
        DPOConfig(loss_type="ipo", beta=0.0)
    with pytest.raises(ValueError, match="'hinge' has none"):
        DPOConfig(loss_type="hinge", label_smoothing=0.1)


def test_presets_state_the_published_values() -> None:
    def of(name: str, *fields: str) -> tuple[Any, ...]:
        return tuple(getattr(GRPOConfig.preset(name), field) for field in fields)

    assert of("grpo", "loss_aggregation", "beta", "kl_estimator") == ("seq_mean_token_mean", 0.04, "k3")
    assert of("dr_grpo", "scale_rewards", "loss_aggregation") == ("none", "seq_mean_token_sum_norm")
    assert of("dapo", "clip_param", "clip_param_high", "loss_aggregation") == (0.2, 0.28, "token_mean")
    assert of("gspo", "ratio_level", "clip_param", "clip_param_high") == ("sequence", 3e-4, 4e-4)
    assert of("cispo", "policy_loss", "cispo_max", "loss_aggregation") == ("cispo", 5.0, "token_mean")
    assert of("rloo", "advantage", "ratio_level", "clip_param") == ("rloo", "sequence_sum", 0.2)
    assert of("reinforce", "advantage", "policy_loss") == ("returns", "reinforce")
    assert of("reinforce_pp", "advantage", "kl_in_reward") == ("reinforce_pp", True)
    assert of("reinforce_pp_baseline", "advantage", "kl_estimator") == ("reinforce_pp_baseline", "k2")
    for name in PRESETS:
        assert of(name, "entropy_coeff") == (0.0,)
        assert of(name, "beta") == ((0.04,) if name == "grpo" else (0.0,))


def test_a_preset_can_be_overridden() -> None:
    config = GRPOConfig.preset("dapo", clip_param_high=0.3, overlong="soft", overlong_length=20, overlong_buffer=4)
    assert (config.clip_param_high, config.overlong) == (0.3, "soft")
    with pytest.raises(ValueError, match="preset 'ppo' is not known"):
        GRPOConfig.preset("ppo")
    with pytest.raises(ValueError, match="beta"):
        GRPOConfig.preset("grpo", beta=-1.0)
