"""Names, defaults and refusals of the method object."""

from __future__ import annotations

from typing import Any

import pytest

from upweight.models.lora import TARGETS
from upweight.server.methods import LORA_TARGETS, Reinforcement, parse_method
from upweight.server.refusals import Refusal
from upweight.training.settings import PRESETS, LoraSettings, PolicySettings

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


@pytest.mark.parametrize("algorithm", ["grpo", "dr_grpo", "dapo", "bnpo", "gspo", "cispo", "rloo"])
def test_offered_algorithms(algorithm: str) -> None:
    assert parse(algorithm=algorithm, advantage="group", correction="none").algorithm == algorithm


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
        ({"algorithm": "ppo"}, ["'ppo' is not offered by this server yet", "grpo, dr_grpo"]),
        ({"algorithm": "reinforce_pp_baseline"}, ["not offered", "offered:"]),
        ({"correction": "decoupled"}, ["correction 'decoupled' is not offered", "none, truncated"]),
        ({"advantage": "reward"}, ["advantage = 'reward' does not fit"]),
        ({"critic": {}}, ["critic belongs to algorithm 'ppo'"]),
        ({"minibatch_size": 9}, ["minibatch_size = 9 exceeds batch_size = 4"]),
        ({"budget": {"max_seconds": 0}}, ["budget.max_seconds = 0"]),
        ({"kl_estimator": "exact"}, ["kl_estimator 'exact' is not offered", '"k1", "k2", "k3"']),
        ({"mask_truncated": True}, ["mask_truncated True is not offered", "false"]),
        ({"lora": {"targets": ["q_proj"]}}, ["lora.targets ['q_proj'] is not offered", "all-linear, attention, mlp"]),
        ({"lora": {"targets": "attn"}}, ["lora.targets 'attn' is not offered"]),
        ({"algorithm": "cispo", "clip_high": 0.3}, ["clip_high = 0.3 has no effect with algorithm 'cispo'"]),
        ({"algorithm": "rloo", "beta": 0.1}, ["beta = 0.1 with kl_estimator 'k1'", "use kl_estimator 'k2' or 'k3'"]),
        ({"lr_schedule": "linear"}, ["lr_schedule = 'linear' needs num_batches"]),
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
    "seed": 3,
}
# Keys that others than the trainer's settings read: the store, the supervisor, the worker's core; or that are refused but for null.
READ_ELSEWHERE = {"num_batches", "microbatch_tokens", "checkpoint_every", "keep_checkpoints", "budget", "sampling"}
ONLY_NULL = {"mask_truncated", "critic"}


def test_every_key_reaches_the_trainer() -> None:
    """A key that were accepted and ignored would be missing here."""
    keys = set(FROZEN) - {"batch_size", "algorithm"}
    assert keys == ACCEPTED.keys() | READ_ELSEWHERE | ONLY_NULL
    plain = PolicySettings.from_method(parse(num_batches=9).model_dump(mode="json"))
    for key, value in ACCEPTED.items():
        accepted = parse(**{"num_batches": 9, key: value}).model_dump(mode="json")
        settings = PolicySettings.from_method(accepted)
        assert settings != plain, key
        given = LoraSettings(**value) if key == "lora" else value
        assert getattr(settings, key, given) == given
        assert getattr(settings.preset, key, given) == given or key == "advantage"


def test_server_and_trainer_offer_the_same() -> None:
    assert set(LORA_TARGETS) == set(TARGETS)
    for algorithm in PRESETS:
        assert PolicySettings.from_method(parse(algorithm=algorithm).model_dump(mode="json")).algorithm == algorithm
