"""The method objects of jobs that train on a file: `supervised` and `dpo`. Names, defaults and ranges are a contract.

Both are `{"type": T, T: {"hyperparameters": {…}}}`. Those of `supervised` are the public contract's, with nothing added: what it
leaves open (optimizer constants, checkpoints) has the defaults of the other methods.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator

from upweight.server.methods import LARGEST, LORA_TARGETS, Budget, Int, Lora, Strict, describe, unknown_key
from upweight.server.refusals import Refusal, invalid

FILE_TYPES = ("supervised", "dpo")
CONTRACT_CONTEXT = 8192  # the contract's least `context_length`; less is for models that have less
SMOOTHED = ("sigmoid", "robust")  # losses that know label smoothing
MEANS = ("ipo", "simpo")  # losses whose scores are means by themselves


class Supervised(Strict):
    batch_size: int = Field(default=8, ge=1, le=64, description="lines of the file per update")
    learning_rate: float = Field(default=1e-5, ge=0)
    n_epochs: int = Field(default=3, ge=1, le=20)
    warmup_ratio: float = Field(default=0.0, ge=0, le=1, description="share of all updates until the full rate")
    weight_decay: float = Field(default=0.0, ge=0)
    packing: bool = Field(default=True, description="several conversations in one row; none sees another")
    max_grad_norm: float = Field(default=1.0, gt=0)
    context_length: int = Field(default=CONTRACT_CONTEXT, ge=2, le=131072, description="longer ones are cut at the end")
    lora: bool = False
    lora_r: int = Field(default=8, ge=8, le=128)
    lora_alpha: Int = Field(default=8, ge=8)
    lora_dropout: float = Field(default=0.0, ge=0, le=1, description="of the adapter's inputs, while it is trained")

    @model_validator(mode="after")
    def _has_effect(self) -> Supervised:
        """What would be without effect is refused rather than ignored."""
        if self.lora_dropout > 0 and not self.lora:
            raise ValueError(
                f"lora_dropout = {self.lora_dropout!r} has no effect without lora; leave it out or set lora"
            )
        return self


class Dpo(Strict):
    beta: float = Field(default=0.1, gt=0, description="scale of the margin against the job's start model")
    loss_type: Literal["sigmoid", "ipo", "hinge", "robust", "simpo"] = "sigmoid"
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    length_normalized: bool = Field(default=False, description="scores are means over an answer's tokens, not sums")
    n_epochs: Int = Field(default=1, ge=1)
    batch_size: Int = Field(default=8, ge=1, description="pairs per update")
    learning_rate: float = Field(default=5e-6, ge=0)
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: Int = Field(default=0, ge=0)
    weight_decay: float = Field(default=0.0, ge=0)
    max_grad_norm: float | None = Field(default=1.0, gt=0, description="None = gradients are not clipped")
    adam_b1: float = Field(default=0.9, ge=0, lt=1)
    adam_b2: float = Field(default=0.95, ge=0, lt=1)
    lora: Lora | None = None
    checkpoint_every: Int = Field(default=10, ge=1)
    keep_checkpoints: Int = Field(default=3, ge=1)
    budget: Budget | None = None
    seed: Int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _has_effect(self) -> Dpo:
        """What would be without effect is refused rather than ignored."""
        if self.label_smoothing > 0 and self.loss_type not in SMOOTHED:
            raise ValueError(
                f"label_smoothing = {self.label_smoothing!r} has no effect with loss_type {self.loss_type!r}; leave it out"
            )
        if self.length_normalized and self.loss_type in MEANS:
            raise ValueError(
                f"length_normalized has no effect with loss_type {self.loss_type!r}, whose scores are means"
            )
        if self.lora is not None and self.lora.targets not in LORA_TARGETS:
            raise ValueError(f"lora.targets {self.lora.targets!r} is not offered; offered: {', '.join(LORA_TARGETS)}")
        return self


MODELS: dict[str, type[Supervised] | type[Dpo]] = {"supervised": Supervised, "dpo": Dpo}


@dataclass(frozen=True, kw_only=True)
class FileMethod:
    """A validated method object of type supervised or dpo."""

    type: str
    hyperparameters: Supervised | Dpo
    seed: int

    def settings(self, rows: int) -> dict[str, Any]:
        """What the job trains with, given how many rows its file has: what the server reads of every job, and the rest.

        Raises Refusal 422 for more batches than can be counted.
        """
        given = self.hyperparameters
        every_job = Dpo(seed=self.seed).model_dump(mode="json") if isinstance(given, Supervised) else {}
        shared = {name: every_job[name] for name in _SHARED if name in every_job}
        num_batches = given.n_epochs * -(-rows // given.batch_size)
        if num_batches > LARGEST:
            raise invalid(
                ("body", "method", self.type, "hyperparameters", "n_epochs"),
                f"n_epochs = {given.n_epochs} makes {num_batches} batches of {rows} rows in a job, at most {LARGEST} can be"
                " counted; use fewer",
            )
        own: dict[str, Any] = {**shared, **given.model_dump(mode="json"), "seed": self.seed}
        if isinstance(given, Supervised):
            lora = {"rank": given.lora_r, "alpha": float(given.lora_alpha), "targets": "all-linear"}
            own |= {"lora": lora if given.lora else None, "warmup_steps": round(given.warmup_ratio * num_batches)}
        return {
            **own,
            "hyperparameters": given.model_dump(mode="json"),
            "rows": rows,
            "num_batches": num_batches,
            "microbatch_tokens": None,
        }


_SHARED = ("lr_schedule", "adam_b1", "adam_b2", "checkpoint_every", "keep_checkpoints", "budget")


def parse_file_method(
    method: dict[str, Any], seed: int | None, *, loc: tuple[str | int, ...] = ("body", "method")
) -> FileMethod:
    """The settings of a method object whose type is in `FILE_TYPES`; `seed` is the request's, which the object's own beats.

    Raises Refusal 422 naming key, value and remedy.
    """
    kind = str(method["type"])
    for key in method:
        if key not in ("type", kind):
            raise invalid((*loc, key), unknown_key(str(key), ["type", kind]), "extra_forbidden")
    outer = {} if method.get(kind) is None else method[kind]
    if not isinstance(outer, dict):
        raise invalid((*loc, kind), f'{kind} must be an object such as {{"hyperparameters": {{…}}}}')
    for key in outer:
        if key != "hyperparameters":
            raise invalid((*loc, kind, key), unknown_key(str(key), ["hyperparameters"]), "extra_forbidden")
    hyper, place = outer.get("hyperparameters"), (*loc, kind, "hyperparameters")
    model = MODELS[kind]
    try:
        parsed = model.model_validate_json(json.dumps({} if hyper is None else hyper))
    except ValidationError as error:
        raise Refusal(422, [describe(item, place, model) for item in error.errors()]) from error
    own = parsed.seed if isinstance(parsed, Dpo) and "seed" in parsed.model_fields_set else None
    return FileMethod(type=kind, hyperparameters=parsed, seed=next((s for s in (own, seed) if s is not None), 0))


def has_small_context(method: FileMethod) -> bool:
    """Whether `refuse_context` has to be asked."""
    given = method.hyperparameters
    return isinstance(given, Supervised) and given.context_length < CONTRACT_CONTEXT


def refuse_context(method: FileMethod, model_context: int | None) -> None:
    """Refuse (422) a `context_length` below the contract's for a model that has the contract's."""
    given = method.hyperparameters
    if isinstance(given, Dpo) or not has_small_context(method):
        return
    if model_context is None or model_context >= CONTRACT_CONTEXT:
        has = "a context that could not be read" if model_context is None else f"a context of {model_context}"
        raise invalid(
            ("body", "method", "supervised", "hyperparameters", "context_length"),
            f"context_length = {given.context_length!r}: less than {CONTRACT_CONTEXT} is for models with a smaller context,"
            f" this one has {has}",
        )
