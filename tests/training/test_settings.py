"""Method objects, their ranges, and the learning rates they mean."""

import math
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from upweight.errors import ConfigError
from upweight.training.optimizer import learning_rate, make_optimizer
from upweight.training.settings import PRESETS, CriticSettings, LoraSettings, PolicySettings


def rates(steps: range, **settings: Any) -> list[float]:
    rate = learning_rate(PolicySettings(learning_rate=1.0, **settings))
    return [float(rate(step)) for step in steps]


def test_constant_with_warmup() -> None:
    assert rates(range(6), warmup_steps=4) == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1])
    assert rates(range(3), warmup_steps=1) == pytest.approx([1, 1, 1])
    assert rates(range(2)) == [1, 1]


def test_linear_falls_to_zero_over_the_job() -> None:
    assert rates(range(6), lr_schedule="linear", total_steps=5) == pytest.approx([1, 0.8, 0.6, 0.4, 0.2, 0])
    warmed = [0.5, 1, 1, 0.75, 0.5, 0.25, 0]
    assert rates(range(7), lr_schedule="linear", total_steps=6, warmup_steps=2) == pytest.approx(warmed)


def test_cosine() -> None:
    want = [0.5 * (1 + math.cos(math.pi * i / 4)) for i in range(5)]
    assert rates(range(5), lr_schedule="cosine", total_steps=4) == pytest.approx(want, abs=1e-7)


def test_schedules_count_updates_and_the_job_batches() -> None:
    several = {"total_steps": 2, "epochs": 2, "minibatch_size": 4, "batch_size": 10}
    assert PolicySettings(**several).updates_per_batch == 6
    assert rates(range(0, 13, 3), lr_schedule="linear", **several) == pytest.approx([1, 0.75, 0.5, 0.25, 0])


def test_without_an_end_the_rate_stays() -> None:
    assert rates(range(0, 900, 300), lr_schedule="cosine") == [1, 1, 1]


def test_first_update_of_adamw_in_numbers() -> None:
    """Clipped to norm 1, Adam's first step is lr·sign, then decay by lr·weight_decay."""
    optimizer = make_optimizer(PolicySettings(learning_rate=0.1, weight_decay=0.5, max_grad_norm=1.0))
    params = {"w": jnp.array([2.0, -4.0])}
    change, state = optimizer.update({"w": jnp.array([30.0, -40.0])}, optimizer.init(params), params)
    np.testing.assert_allclose(change["w"], [-0.1 - 0.1, 0.1 + 0.2], rtol=1e-5)
    np.testing.assert_allclose(state[1][0].mu["w"], [0.1 * 0.6, 0.1 * -0.8], rtol=1e-5)
    np.testing.assert_allclose(state[1][0].nu["w"], [0.05 * 0.36, 0.05 * 0.64], rtol=1e-5)


def test_without_a_norm_gradients_are_not_clipped() -> None:
    optimizer = make_optimizer(PolicySettings.from_method({"max_grad_norm": None}))
    params = {"w": jnp.array([2.0, -4.0])}
    _, state = optimizer.update({"w": jnp.array([30.0, -40.0])}, optimizer.init(params), params)
    np.testing.assert_allclose(state[1][0].mu["w"], [3.0, -4.0], rtol=1e-5)


def test_a_method_object_is_read() -> None:
    settings = PolicySettings.from_method(
        {
            "batch_size": 64,
            "num_batches": 30,
            "algorithm": "dapo",
            "clip_low": 0.1,
            "clip_high": None,
            "kl_estimator": "k2",
            "beta": 0.01,
            "epochs": 2,
            "minibatch_size": 16,
            "lora": {"rank": 8},
            "sampling": {"max_tokens": 99, "max_context": None},
            "mask_truncated": False,
            "total_steps": 7,
        }
    )
    assert settings.preset.clip_low == 0.1
    assert settings.preset.clip_high == 0.28
    assert settings.preset.kl_estimator == "k2"
    assert settings.lora == LoraSettings(rank=8, alpha=32.0)
    assert settings.lora.scale == 4.0
    assert (settings.total_steps, settings.updates_per_batch, settings.max_response_length) == (30, 8, 99)
    assert PolicySettings.from_method({"lora": {}}).lora == LoraSettings()
    assert PolicySettings.from_method({}) == PolicySettings()


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ({"algorithm": "a2c"}, "algorithm 'a2c' is not offered; offered: grpo, bnpo"),
        ({"advantage": "reward"}, "advantage 'reward' does not fit algorithm 'grpo'; use given or group"),
        ({"algorithm": "ppo", "advantage": "group"}, "advantage 'group' does not fit algorithm 'ppo'; use reward"),
        ({"correction": "clipped"}, "correction 'clipped' is not offered; offered: none, truncated, masked, decoupled"),
        ({"correction": "masked", "is_cap": 0.5}, "is_cap 0.5 leaves out every token with correction 'masked'"),
        ({"kl_estimator": "k4"}, "kl_estimator 'k4' is not offered; offered: exact, k1, k2, k3"),
        ({"lr_schedule": "step"}, "lr_schedule 'step' is not offered"),
        ({"critic": {}}, "critic belongs to algorithm 'ppo'"),
        ({"algorithm": "ppo", "critic": {"gamma": 1.1}}, r"gamma 1.1 is out of range; allowed: \[0, 1\]"),
        ({"algorithm": "ppo", "critic": {"kind": "model"}}, "kind 'model' is not offered; offered: value_head"),
        (
            {"algorithm": "ppo", "critic": {"lambda": 1}},
            "critic.lambda is not known; known: kind, learning_rate, gamma",
        ),
        ({"learning_rate": -1e-5}, r"learning_rate -1e-05 is out of range; allowed: \[0, inf\)"),
        ({"learning_rate": math.nan}, "learning_rate nan is out of range"),
        ({"learning_rate": math.inf}, "learning_rate inf is out of range"),
        ({"max_grad_norm": 0}, r"max_grad_norm 0 is out of range; allowed: \(0, inf\)"),
        ({"clip_low": 1.0}, r"clip_low 1.0 is out of range; allowed: \(0, 1\)"),
        ({"adam_b2": 1.0}, r"adam_b2 1.0 is out of range; allowed: \[0, 1\)"),
        ({"beta": -0.1}, "beta -0.1 is out of range"),
        ({"epochs": 0}, r"epochs 0 is out of range; allowed: \[1, inf\)"),
        ({"minibatch_size": 0}, "minibatch_size 0 is out of range"),
        ({"lora": {"rank": 0}}, "rank 0 is out of range"),
        ({"lora": {"r": 8}}, "lora.r is not known; known: rank, alpha, targets"),
    ],
)
def test_what_is_not_offered_is_refused(method: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PolicySettings.from_method(method)


def test_presets() -> None:
    rows = {n: (p.loss, p.aggregation, p.advantage, p.clip_low, p.clip_high) for n, p in PRESETS.items()}
    assert rows == {
        "grpo": ("clip", "seq_mean_token_mean", "group", 0.2, 0.2),
        "bnpo": ("clip", "token_mean", "group", 0.2, 0.2),
        "dr_grpo": ("clip", "seq_mean_token_sum_norm", "group_centered", 0.2, 0.2),
        "dapo": ("clip", "token_mean", "group", 0.2, 0.28),
        "gspo": ("clip_sequence", "seq_mean_token_mean", "group", 3e-4, 4e-4),
        "cispo": ("cispo", "token_mean", "group", 0.2, 0.2),
        "rloo": ("clip_sequence_sum", "seq_mean_token_sum", "rloo", 0.2, 0.2),
        "reinforce": ("reinforce", "token_mean", "returns", 0.2, 0.2),
        "reinforce_pp": ("clip", "token_mean", "returns", 0.2, 0.2),
        "reinforce_pp_baseline": ("clip", "token_mean", "group_centered", 0.2, 0.2),
        "ppo": ("clip", "token_mean", "gae", 0.2, 0.2),
    }
    assert {name for name, preset in PRESETS.items() if preset.whiten} == {
        "reinforce_pp",
        "reinforce_pp_baseline",
        "ppo",
    }
    assert [name for name, preset in PRESETS.items() if preset.mask_truncated] == ["dapo"]
    estimators = {name: (preset.kl_estimator, preset.kl_in_reward) for name, preset in PRESETS.items()}
    in_reward = {name for name, (_, inside) in estimators.items() if inside}
    assert in_reward == {"rloo", "reinforce", "reinforce_pp", "ppo"}
    assert {name for name, (kind, _) in estimators.items() if kind == "k1"} == in_reward
    assert estimators["reinforce_pp_baseline"] == ("k2", False)


def test_ppo_has_a_critic_and_takes_rewards() -> None:
    settings = PolicySettings.from_method({"algorithm": "ppo", "critic": {"warmup_batches": 2}, "num_batches": 6})
    assert settings.advantage == "reward"
    assert settings.critic == CriticSettings(warmup_batches=2)
    assert PolicySettings.from_method({"algorithm": "ppo"}).critic == CriticSettings()
    assert PolicySettings.from_method({"algorithm": "reinforce_pp_baseline"}).advantage == "given"
    falling = replace(settings, learning_rate=1.0, lr_schedule="linear")  # over the batches that train the policy
    assert [float(learning_rate(falling)(step)) for step in range(5)] == pytest.approx([1, 0.75, 0.5, 0.25, 0])
