"""The method object of a job: names, defaults and ranges are a contract (a test freezes them).

An unknown key is refused with the nearest known one. What is valid but has no trainer here yet is refused as
"not offered", with the list of what is.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
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
REWARD_ALGORITHMS = frozenset({"ppo", "reinforce", "reinforce_pp"})  # which take nothing else
BASELINE_ALGORITHMS = frozenset({"reinforce_pp_baseline"})  # whose own estimator is the group's mean
WITHOUT_CLIP = frozenset({"cispo", "reinforce"})
BOUNDED = ("truncated", "masked")  # corrections that `is_cap` bounds
KL_IN_LOSS = {"rloo": "k1", "reinforce_pp_baseline": "k2"}  # default estimators other than k3

OFFERED: dict[str, tuple[str, ...]] = {
    "type": ("reinforcement", "supervised", "dpo"),
}
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
    is_cap: float = Field(default=2.0, gt=0, description="truncated: cap of the weights; masked: end of the band")
    mask_truncated: bool | None = None
    filter_flat_groups: bool | None = None
    overlong_buffer: Int | None = Field(default=None, ge=1, description="None = no punishment of long answers")
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
    def _fill_in(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        algorithm, filled = given.get("algorithm", "grpo"), dict(given)
        if given.get("advantage") is None:
            own = isinstance(algorithm, str) and algorithm in REWARD_ALGORITHMS
            filled["advantage"] = "reward" if own else "given"
        if algorithm == "ppo" and given.get("critic") is None:
            filled["critic"] = {}
        return filled

    @model_validator(mode="after")
    def _fits_together(self) -> Reinforcement:
        only_reward, baseline = self.algorithm in REWARD_ALGORITHMS, self.algorithm in BASELINE_ALGORITHMS
        if (self.advantage == "reward") != only_reward and not baseline:
            allowed = "reward" if only_reward else "given or group"
            raise ValueError(f"advantage = {self.advantage!r} does not fit algorithm {self.algorithm!r}; use {allowed}")
        if self.critic is not None and self.algorithm != "ppo":
            raise ValueError(f"critic belongs to algorithm 'ppo', not {self.algorithm!r}; leave it out")
        if self.minibatch_size is not None and self.minibatch_size > self.batch_size:
            raise ValueError(f"minibatch_size = {self.minibatch_size} exceeds batch_size = {self.batch_size}")
        if self.batch_size == 1 and needs_task(self.model_dump(include={"algorithm", "advantage"})):
            raise ValueError(
                f"batch_size = 1 with advantage {self.advantage!r} of algorithm {self.algorithm!r} leaves nothing to compare"
                " a sample with; use the size of a group or more"
            )
        self._has_effect()
        return self

    def _has_effect(self) -> None:
        """What would be without effect is refused rather than ignored."""
        if self.algorithm in WITHOUT_CLIP:
            for name in ("clip_low", "clip_high", "dual_clip"):
                if (value := getattr(self, name)) is not None:
                    raise ValueError(
                        f"{name} = {value!r} has no effect with algorithm {self.algorithm!r}; leave it out"
                    )
        in_loss = self.algorithm not in REWARD_ALGORITHMS and (self.algorithm, self.advantage) != ("rloo", "group")
        if self.beta > 0 and in_loss and (self.kl_estimator or KL_IN_LOSS.get(self.algorithm, "k3")) == "k1":
            raise ValueError(
                f"beta = {self.beta!r} with kl_estimator 'k1' has no effect: as a loss term its expected gradient is 0;"
                " use kl_estimator 'k2' or 'k3'"
                + (", or advantage 'group', which takes the KL off the reward" if self.algorithm == "rloo" else "")
            )
        if self.kl_estimator is not None and self.beta == 0:
            raise ValueError(f"kl_estimator = {self.kl_estimator!r} has no effect with beta = 0; leave it out")
        if self.filter_flat_groups and not needs_task(self.model_dump(include={"algorithm", "advantage"})):
            raise ValueError(
                f"filter_flat_groups = True has no effect with advantage {self.advantage!r} of algorithm {self.algorithm!r},"
                " which compare no groups; leave it out"
            )
        if self.overlong_buffer is not None:
            if self.advantage == "given":
                raise ValueError(
                    f"overlong_buffer = {self.overlong_buffer} has no effect with advantage 'given': it lowers raw rewards;"
                    " leave it out or use advantage 'group'"
                )
            if self.overlong_buffer > self.sampling.max_tokens:
                raise ValueError(
                    f"overlong_buffer = {self.overlong_buffer} exceeds sampling.max_tokens = {self.sampling.max_tokens}"
                )
        if self.correction not in BOUNDED and self.is_cap != type(self).model_fields["is_cap"].default:
            raise ValueError(
                f"is_cap = {self.is_cap!r} has no effect with correction {self.correction!r}; leave it out"
                " or use correction 'truncated' or 'masked'"
            )
        if self.correction == "masked" and self.is_cap < 1:
            raise ValueError(f"is_cap = {self.is_cap!r} leaves out every token with correction 'masked'; use 1 or more")
        if self.critic is not None and self.num_batches is not None and self.critic.warmup_batches >= self.num_batches:
            raise ValueError(
                f"critic.warmup_batches = {self.critic.warmup_batches} of num_batches = {self.num_batches} leave no batch"
                " that trains the policy"
            )
        if self.lr_schedule != "constant" and self.num_batches is None:
            raise ValueError(
                f"lr_schedule = {self.lr_schedule!r} needs num_batches, the end to which the rate falls; use 'constant'"
            )


def needs_task(reinforcement: Mapping[str, Any]) -> bool:
    """Whether each sample must name its group; False for the settings of a job that takes no samples."""
    baseline, advantage = reinforcement.get("algorithm") in BASELINE_ALGORITHMS, reinforcement.get("advantage")
    return advantage == "group" or (baseline and advantage == "reward")


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
