"""Names, defaults and refusals of the method object."""

from __future__ import annotations

from typing import Any

import pytest

from upweight.models.lora import TARGETS
from upweight.server.methods import (
    KL_IN_LOSS,
    LORA_TARGETS,
    REWARD_ALGORITHMS,
    Reinforcement,
    needs_task,
    parse_method,
)
from upweight.server.refusals import Refusal
from upweight.server.store import versions
from upweight.training.fates import FATES
from upweight.training.settings import PRESETS, CriticSettings, LoraSettings, PolicySettings

FROZEN = {
    "batch_size": 4,
    "num_batches": None,
    "algorithm": "grpo",
    "advantage": "given",
    "learning_rate": 1e-5,
    "lr_schedule": "constant",
    "warmup_steps": 0,
    "weight_decay": 0.0,
    "max_grad_norm": 1.0,
    "adam_b1": 0.9,
    "adam_b2": 0.95,
    "epochs": 1,
    "minibatch_size": None,
    "microbatch_tokens": None,
    "clip_low": None,
    "clip_high": None,
    "dual_clip": None,
    "beta": 0.0,
    "kl_estimator": None,
    "entropy_coeff": 0.0,
    "is_cap": 2.0,
    "mask_truncated": None,
    "filter_flat_groups": None,
    "overlong_buffer": None,
    "correction": "truncated",
    "lora": None,
    "sampling": {"max_tokens": 256, "max_context": None},
    "critic": None,
    "checkpoint_every": 10,
    "keep_checkpoints": 3,
    "budget": None,
    "seed": 0,
}


def parse(**settings: Any) -> Reinforcement:
    return parse_method({"type": "reinforcement", "reinforcement": {"batch_size": 4, **settings}})


def test_names_and_defaults_are_frozen() -> None:
    assert parse().model_dump() == FROZEN
    assert parse(lora={}).model_dump()["lora"] == {"rank": 16, "alpha": 32, "targets": "all-linear"}


CRITIC = {"kind": "value_head", "learning_rate": 1e-5, "gamma": 1.0, "gae_lambda": 0.95, "warmup_batches": 0}
ADVANTAGES = {
    **dict.fromkeys(("grpo", "dr_grpo", "dapo", "bnpo", "gspo", "cispo", "rloo"), ("given", "group")),
    **dict.fromkeys(("reinforce", "reinforce_pp", "ppo"), ("reward",)),
    "reinforce_pp_baseline": ("given", "group", "reward"),
}


@pytest.mark.parametrize("algorithm", ADVANTAGES)
def test_each_algorithm_takes_its_advantages_and_every_correction(algorithm: str) -> None:
    assert parse(algorithm=algorithm).advantage == ADVANTAGES[algorithm][0]
    for correction in ("none", "truncated", "masked", "decoupled"):
        for advantage in ADVANTAGES[algorithm]:
            parsed = parse(algorithm=algorithm, advantage=advantage, correction=correction)
            assert (parsed.advantage, parsed.correction) == (advantage, correction)
            with_groups = advantage == "group" or (algorithm == "reinforce_pp_baseline" and advantage == "reward")
            assert needs_task(parsed.model_dump()) is with_groups
    for advantage in {"given", "group", "reward"} - set(ADVANTAGES[algorithm]):
        with pytest.raises(Refusal, match=f"advantage = '{advantage}' does not fit algorithm '{algorithm}'"):
            parse(algorithm=algorithm, advantage=advantage)


def test_ppo_has_a_critic_whose_defaults_are_frozen() -> None:
    assert parse(algorithm="ppo").model_dump() == {
        **FROZEN,
        "algorithm": "ppo",
        "advantage": "reward",
        "critic": CRITIC,
    }
    assert parse(algorithm="ppo", critic={"gamma": 0.9}).model_dump()["critic"] == {**CRITIC, "gamma": 0.9}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"learning_rat": 1}, ["unknown key 'learning_rat'", "'learning_rate'"]),
        ({"lora": {"rnk": 4}}, ["unknown key 'rnk'", "'rank'"]),
        ({"batch_size": 0}, ["batch_size = 0", "greater than or equal to 1"]),
        ({"batch_size": True}, ["batch_size = True"]),
        ({"learning_rate": -1.0}, ["learning_rate = -1.0", "0"]),
        ({"adam_b1": 1.0}, ["adam_b1 = 1.0", "less than 1"]),
        ({"algorithm": "grp"}, ["algorithm = 'grp'", "'grpo'"]),
        ({"algorithm": "ppo", "critic": {"lambda": 1}}, ["unknown key 'lambda'", "'gae_lambda'"]),
        ({"algorithm": "ppo", "critic": {"gamma": 2.0}}, ["critic.gamma = 2.0", "less than or equal to 1"]),
        ({"algorithm": "ppo", "critic": {"warmup_batches": 4}, "num_batches": 4}, ["warmup_batches = 4", "no batch"]),
        ({"algorithm": "ppo", "advantage": "given"}, ["advantage = 'given' does not fit algorithm 'ppo'; use reward"]),
        ({"algorithm": "reinforce", "clip_low": 0.1}, ["clip_low = 0.1 has no effect with algorithm 'reinforce'"]),
        ({"correction": "masked", "is_cap": 0.5}, ["is_cap = 0.5", "use 1 or more"]),
        (
            {"algorithm": "reinforce_pp_baseline", "beta": 0.1, "kl_estimator": "k1"},
            ["beta = 0.1", "'k1' has no effect"],
        ),
        ({"advantage": "reward"}, ["advantage = 'reward' does not fit"]),
        ({"critic": {}}, ["critic belongs to algorithm 'ppo'"]),
        ({"minibatch_size": 9}, ["minibatch_size = 9 exceeds batch_size = 4"]),
        ({"budget": {"max_seconds": 0}}, ["budget.max_seconds = 0"]),
        ({"kl_estimator": "k4"}, ["kl_estimator = 'k4'", "'exact', 'k1', 'k2' or 'k3'"]),
        ({"lora": {"targets": ["q_proj"]}}, ["lora.targets ['q_proj'] is not offered", "all-linear, attention, mlp"]),
        ({"lora": {"targets": "attn"}}, ["lora.targets 'attn' is not offered"]),
        ({"algorithm": "cispo", "clip_high": 0.3}, ["clip_high = 0.3 has no effect with algorithm 'cispo'"]),
        ({"algorithm": "rloo", "beta": 0.1}, ["beta = 0.1 with kl_estimator 'k1'", "use kl_estimator 'k2' or 'k3'"]),
        ({"filter_flat_groups": True}, ["filter_flat_groups = True has no effect with advantage 'given'"]),
        ({"overlong_buffer": 8}, ["overlong_buffer = 8 has no effect with advantage 'given'", "'group'"]),
        (
            {"overlong_buffer": 300, "advantage": "group"},
            ["overlong_buffer = 300 exceeds sampling.max_tokens = 256"],
        ),
        ({"lr_schedule": "linear"}, ["lr_schedule = 'linear' needs num_batches"]),
        ({"correction": "none", "is_cap": 3.0}, ["is_cap = 3.0 has no effect with correction 'none'", "'truncated'"]),
        ({"correction": "decoupled", "is_cap": 1.0}, ["is_cap = 1.0 has no effect with correction 'decoupled'"]),
        ({"kl_estimator": "k3"}, ["kl_estimator = 'k3' has no effect with beta = 0"]),
        ({"batch_size": 1, "advantage": "group"}, ["batch_size = 1 with advantage 'group'", "size of a group or more"]),
        (
            {"batch_size": 1, "algorithm": "reinforce_pp_baseline", "advantage": "reward"},
            ["batch_size = 1 with advantage 'reward'"],
        ),
        ({"dual_clip": 1.0}, ["dual_clip = 1.0", "greater than 1"]),
    ],
)
def test_refusals_name_field_value_and_remedy(settings: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(Refusal) as refused:
        parse(**settings)
    assert refused.value.status == 422
    for word in words:
        assert word in refused.value.text


@pytest.mark.parametrize(
    ("method", "word"),
    [
        (None, "must be an object"),
        (
            {"type": "spec-draft"},
            "'spec-draft' is not offered by this server yet; offered: reinforcement, supervised, dpo",
        ),
        ({"type": "reinforce"}, "unknown; known: reinforcement"),
        ({"type": "reinforcement", "reinforcment": {}}, "nearest known one is 'reinforcement'"),
        ({"type": "reinforcement"}, "batch_size is required"),
    ],
)
def test_refused_methods(method: Any, word: str) -> None:
    with pytest.raises(Refusal) as refused:
        parse_method(method)
    assert word in refused.value.text


# A value of each key that this server accepts, other than its default.
ACCEPTED: dict[str, Any] = {
    "learning_rate": 1e-3,
    "lr_schedule": "cosine",
    "warmup_steps": 2,
    "weight_decay": 0.1,
    "max_grad_norm": None,
    "adam_b1": 0.8,
    "adam_b2": 0.99,
    "epochs": 2,
    "minibatch_size": 2,
    "clip_low": 0.1,
    "clip_high": 0.3,
    "dual_clip": 3.0,
    "beta": 0.04,
    "kl_estimator": "k2",
    "entropy_coeff": 0.01,
    "is_cap": 5.0,
    "correction": "none",
    "advantage": "group",
    "lora": {"rank": 4, "alpha": 8, "targets": "mlp"},
    "mask_truncated": True,
    "filter_flat_groups": True,
    "overlong_buffer": 64,
    "critic": {**CRITIC, "gae_lambda": 0.5},
    "seed": 3,
}
# Keys that others than the trainer's settings read: the store, the supervisor, the worker's core.
READ_ELSEWHERE = {"num_batches", "microbatch_tokens", "checkpoint_every", "keep_checkpoints", "budget", "sampling"}
NESTED = {"lora": LoraSettings, "critic": CriticSettings}


def test_every_key_reaches_the_trainer() -> None:
    """A key that were accepted and ignored would be missing here."""
    keys = set(FROZEN) - {"batch_size", "algorithm"}
    assert keys == ACCEPTED.keys() | READ_ELSEWHERE
    for key, value in ACCEPTED.items():
        start = {"num_batches": 9, "algorithm": "ppo" if key == "critic" else "grpo"}
        start |= {"beta": 0.1} if key == "kl_estimator" else {}
        start |= {"advantage": "group"} if key in ("filter_flat_groups", "overlong_buffer") else {}
        plain = PolicySettings.from_method(parse(**start).model_dump(mode="json"))
        accepted = parse(**{**start, key: value}).model_dump(mode="json")
        settings = PolicySettings.from_method(accepted)
        assert settings != plain, key
        given = NESTED[key](**value) if key in NESTED else value
        assert getattr(settings, key, given) == given
        assert getattr(settings.preset, key, given) == given or key == "advantage"


def test_server_and_trainer_offer_the_same() -> None:
    assert set(LORA_TARGETS) == set(TARGETS)
    assert set(ADVANTAGES) == set(PRESETS)
    assert versions.FATES == FATES
    for algorithm, preset in PRESETS.items():
        for advantage in ADVANTAGES[algorithm]:
            method = parse(algorithm=algorithm, advantage=advantage).model_dump(mode="json")
            assert PolicySettings.from_method(method).algorithm == algorithm
        assert (algorithm in REWARD_ALGORITHMS | {"rloo"}) == preset.kl_in_reward
        if algorithm not in REWARD_ALGORITHMS:
            assert KL_IN_LOSS.get(algorithm, "k3") == preset.kl_estimator


def test_rloo_takes_the_kl_off_a_reward_and_not_off_an_advantage() -> None:
    for given, in_reward in (({"advantage": "group"}, True), ({"kl_estimator": "k3"}, False)):
        method = parse(algorithm="rloo", beta=0.1, **given).model_dump(mode="json")
        settings = PolicySettings.from_method(method)
        assert (settings.kl_in_reward, settings.kl_in_loss) == (in_reward, not in_reward)
