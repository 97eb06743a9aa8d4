"""The method object of a job: names, defaults and ranges are a contract (a test freezes them).

An unknown key is refused with the nearest known one. What is valid but has no trainer here yet is refused as
"not offered", with the list of what is.
"""

from __future__ import annotations

import difflib
import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from upweight.server.refusals import Refusal, problem

Algorithm = Literal[
    "grpo",
    "dr_grpo",
    "dapo",
    "gspo",
    "cispo",
    "rloo",
    "reinforce",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "bnpo",
    "ppo",
]
REWARD_ALGORITHMS = frozenset({"ppo", "reinforce", "reinforce_pp"})

OFFERED: dict[str, tuple[str, ...]] = {
    "type": ("reinforcement", "supervised", "dpo"),
    "algorithm": ("grpo", "dr_grpo", "dapo", "bnpo", "gspo", "cispo", "rloo"),
    "advantage": ("given", "group"),
    "correction": ("none", "truncated"),
}
# As above, for fields that are left out or null when the trainer's own way is wanted.
OFFERED_IF_GIVEN: dict[str, tuple[object, ...]] = {"kl_estimator": ("k1", "k2", "k3"), "mask_truncated": (False,)}
LORA_TARGETS = ("all-linear", "attention", "mlp")
METHOD_TYPES = ("reinforcement", "dpo", "supervised", "spec-draft")


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


LARGEST = 2**31 - 1  # beyond it neither the store nor the arrays can count
Int = Annotated[int, Field(le=LARGEST)]


class Lora(Strict):
    rank: Int = Field(default=16, ge=1)
    alpha: float = Field(default=32, gt=0)
    targets: str | list[str] = "all-linear"


class Sampling(Strict):
    max_tokens: Int = Field(default=256, ge=1)
    max_context: Int | None = Field(default=None, ge=1)


class Critic(Strict):
    kind: Literal["value_head"] = "value_head"
    learning_rate: float = Field(default=1e-5, ge=0)
    gamma: float = Field(default=1.0, ge=0, le=1)
    gae_lambda: float = Field(default=0.95, ge=0, le=1)
    warmup_batches: Int = Field(default=0, ge=0)


class Budget(Strict):
    max_seconds: float | None = Field(default=None, gt=0)
    max_samples: Int | None = Field(default=None, ge=1)
    max_tokens: Int | None = Field(default=None, ge=1)


class Reinforcement(Strict):
    batch_size: Int = Field(ge=1, description="samples per batch = capacity of a batch on the wire")
    num_batches: Int | None = Field(default=None, ge=1, description="None = until cancelled or a budget is used up")
    algorithm: Algorithm = "grpo"
    advantage: Literal["given", "group", "reward"] | None = Field(
        default=None, description="None is filled in: reward for ppo, reinforce and reinforce_pp, else given"
    )
    learning_rate: float = Field(default=1e-5, ge=0)
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: Int = Field(default=0, ge=0)
    weight_decay: float = Field(default=0.0, ge=0)
    max_grad_norm: float | None = Field(default=1.0, gt=0, description="None = gradients are not clipped")
    adam_b1: float = Field(default=0.9, ge=0, lt=1)
    adam_b2: float = Field(default=0.95, ge=0, lt=1)
    epochs: Int = Field(default=1, ge=1)
    minibatch_size: Int | None = Field(default=None, ge=1)
    microbatch_tokens: Int | None = Field(default=None, ge=1)
    # None = the preset's own value
    clip_low: float | None = Field(default=None, gt=0, lt=1)
    clip_high: float | None = Field(default=None, gt=0)
    dual_clip: float | None = Field(default=None, gt=1)
    beta: float = Field(default=0.0, ge=0, description="KL against the job's start model")
    kl_estimator: Literal["exact", "k1", "k2", "k3"] | None = None
    entropy_coeff: float = Field(default=0.0, ge=0)
    is_cap: float = Field(default=2.0, gt=0, description="cap of the weights of the truncated correction")
    mask_truncated: bool | None = None
    correction: Literal["none", "truncated", "masked", "decoupled"] = "truncated"
    lora: Lora | None = None
    sampling: Sampling = Sampling()
    critic: Critic | None = None
    checkpoint_every: Int = Field(default=10, ge=1)
    keep_checkpoints: Int = Field(default=3, ge=1)
    budget: Budget | None = None
    seed: Int = Field(default=0, ge=0)

    @model_validator(mode="before")
    @classmethod
    def _fill_advantage(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("advantage") is None:
            algorithm = given.get("algorithm", "grpo")
            own = isinstance(algorithm, str) and algorithm in REWARD_ALGORITHMS
            return {**given, "advantage": "reward" if own else "given"}
        return given

    @model_validator(mode="after")
    def _fits_together(self) -> Reinforcement:
        if (self.advantage == "reward") != (self.algorithm in REWARD_ALGORITHMS):
            allowed = "reward" if self.algorithm in REWARD_ALGORITHMS else "given or group"
            raise ValueError(f"advantage = {self.advantage!r} does not fit algorithm {self.algorithm!r}; use {allowed}")
        if self.critic is not None and self.algorithm != "ppo":
            raise ValueError(f"critic belongs to algorithm 'ppo', not {self.algorithm!r}; leave it out")
        if self.minibatch_size is not None and self.minibatch_size > self.batch_size:
            raise ValueError(f"minibatch_size = {self.minibatch_size} exceeds batch_size = {self.batch_size}")
        self._has_effect()
        return self

    def _has_effect(self) -> None:
        """What would be without effect is refused rather than ignored."""
        if self.algorithm == "cispo":
            for name in ("clip_low", "clip_high", "dual_clip"):
                if (value := getattr(self, name)) is not None:
                    raise ValueError(f"{name} = {value!r} has no effect with algorithm 'cispo'; leave it out")
        if self.beta > 0 and (self.kl_estimator or ("k1" if self.algorithm == "rloo" else "k3")) == "k1":
            raise ValueError(
                f"beta = {self.beta!r} with kl_estimator 'k1' has no effect: as a loss term its expected gradient is 0;"
                " use kl_estimator 'k2' or 'k3'"
            )
        if self.lr_schedule != "constant" and self.num_batches is None:
            raise ValueError(
                f"lr_schedule = {self.lr_schedule!r} needs num_batches, the end to which the rate falls; use 'constant'"
            )


def parse_method(method: object, *, loc: tuple[str | int, ...] = ("body", "method")) -> Reinforcement:
    """The validated reinforcement settings of a method object. Raises Refusal 422 naming key, value and remedy."""
    if not isinstance(method, dict):
        raise _refuse(loc, 'method must be an object such as {"type": "reinforcement", "reinforcement": {…}}')
    kind = method.get("type")
    if kind not in METHOD_TYPES:
        raise _refuse((*loc, "type"), f"method type {kind!r} is unknown; known: {', '.join(METHOD_TYPES)}")
    if kind not in OFFERED["type"]:
        raise _not_offered((*loc, "type"), "method type", str(kind), OFFERED["type"])
    for key in method:
        if key not in ("type", kind):
            raise _refuse((*loc, key), unknown_key(str(key), ["type", str(kind)]), "extra_forbidden")
    try:
        parsed = Reinforcement.model_validate_json(json.dumps(method.get("reinforcement", {})))
    except ValidationError as error:
        raise Refusal(422, [describe(item, (*loc, "reinforcement")) for item in error.errors()]) from error
    for field in ("algorithm", "advantage", "correction"):
        if getattr(parsed, field) not in OFFERED[field]:
            raise _not_offered((*loc, "reinforcement", field), field, getattr(parsed, field), OFFERED[field])
    for field, offered in OFFERED_IF_GIVEN.items():
        value = getattr(parsed, field)
        if value is not None and value not in offered:
            raise _not_offered((*loc, "reinforcement", field), field, value, tuple(json.dumps(one) for one in offered))
    if parsed.lora is not None and parsed.lora.targets not in LORA_TARGETS:
        raise _not_offered(
            (*loc, "reinforcement", "lora", "targets"), "lora.targets", parsed.lora.targets, LORA_TARGETS
        )
    return parsed


def _not_offered(loc: tuple[str | int, ...], what: str, value: object, offered: tuple[str, ...]) -> Refusal:
    return _refuse(loc, f"{what} {value!r} is not offered by this server yet; offered: {', '.join(offered)}")


def _refuse(loc: tuple[str | int, ...], message: str, kind: str = "value_error") -> Refusal:
    return Refusal(422, [problem(loc, message, kind)])


def unknown_key(key: str, known: list[str]) -> str:
    nearest = difflib.get_close_matches(key, known, n=1, cutoff=0.0)
    return f"unknown key {key!r}; the nearest known one is {nearest[0]!r}"


def describe(item: Any, loc: tuple[str | int, ...], root: type[BaseModel] = Reinforcement) -> dict[str, Any]:
    """One pydantic problem as an answer's entry that names field, value and range."""
    path = tuple(item["loc"])
    place = (*loc, *path)
    if item["type"] == "extra_forbidden":
        return problem(place, unknown_key(str(path[-1]), _keys_at(path[:-1], root)), "extra_forbidden")
    field = ".".join(str(part) for part in path)
    message = item["msg"].removeprefix("Value error, ")
    if not field:
        return problem(place, message, item["type"])
    if item["type"] == "missing":
        return problem(place, f"{field} is required", "missing")
    return problem(place, f"{field} = {item['input']!r}: {message}", item["type"])


_NESTED: dict[str, type[BaseModel]] = {"lora": Lora, "sampling": Sampling, "critic": Critic, "budget": Budget}


def _keys_at(path: tuple[str | int, ...], root: type[BaseModel]) -> list[str]:
    model = _NESTED.get(str(path[0]), root) if path else root
    return list(model.model_fields)
