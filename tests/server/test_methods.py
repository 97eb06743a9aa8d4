"""Names, defaults and refusals of the method object."""

from __future__ import annotations

from typing import Any

import pytest

from upweight.server.methods import Reinforcement, parse_method
from upweight.server.refusals import Refusal

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
        ({"type": "dpo", "dpo": {}}, "method type 'dpo' is not offered by this server yet; offered: reinforcement"),
        ({"type": "spec-draft"}, "not offered"),
        ({"type": "reinforce"}, "unknown; known: reinforcement"),
        ({"type": "reinforcement", "reinforcment": {}}, "nearest known one is 'reinforcement'"),
        ({"type": "reinforcement"}, "batch_size is required"),
    ],
)
def test_refused_methods(method: Any, word: str) -> None:
    with pytest.raises(Refusal) as refused:
        parse_method(method)
    assert word in refused.value.text
