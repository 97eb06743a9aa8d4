"""The nouns of a rollout run.

A `Sample` is one flat row: prompt and completion tokens in one list; context tokens carry logprob 0.0 and mask 0, trained
tokens the model's logprob and mask 1. `debug_info` may report the version its tokens come from: `inference_version` (int)
and `token_inference_versions` (list of int). The smallest version that a group reports is then its version, instead of the
one polled when the rollout started; the runner stores it as `starting_inference_version`.
"""

from __future__ import annotations

import os
import random
import uuid
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Self, TypeVar

T = TypeVar("T")

# Of our own, so that a seed set by the user repeats no id; a child process gets another one. Asking the system each time would
# hand the interpreter to another thread each time.
_bits = random.Random(os.urandom(32))
if hasattr(os, "register_at_fork"):  # not where there is no fork
    os.register_at_fork(after_in_child=lambda: _bits.seed(os.urandom(32)))


class BaseID(str):
    """`<prefix>-<32 hex digits>`."""

    PREFIX: ClassVar[str] = "id"
    __slots__ = ()

    @classmethod
    def generate(cls) -> Self:
        return cls(f"{cls.PREFIX}-{uuid.UUID(int=_bits.getrandbits(128), version=4).hex}")


class TaskID(BaseID):
    PREFIX = "task"
    __slots__ = ()


class SampleID(BaseID):
    PREFIX = "sample"
    __slots__ = ()


@dataclass(kw_only=True)
class Task(Generic[T]):
    """`spec` is what the dataset gave; the version is the one known when the task was started."""

    id: TaskID = field(default_factory=TaskID.generate)
    spec: T
    starting_inference_version: int


@dataclass(kw_only=True)
class Sample:
    """Not checked here: the runner checks what a rollout returns. `normalized_reward` is what training consumes."""

    id: SampleID = field(default_factory=SampleID.generate)
    token_ids: list[int]
    logprobs: list[float]
    mask: list[int]
    normalized_reward: float
    metadata: dict[str, str] = field(default_factory=dict)
    debug_info: dict[str, Any] = field(default_factory=dict)


@dataclass
class SampleGroup:
    """The samples of one task, or its rejection."""

    is_rejected: bool = False
    samples: list[Sample] = field(default_factory=list)


@dataclass
class JobStatusUpdate:
    inference_version: int


@dataclass
class RolloutException:
    """A rollout failed for good and the run shall end with its exception; `traceback` is text."""

    exception: BaseException
    traceback: str
    task: Task[Any] | None = field(default=None, compare=False)
    retries: int = field(default=0, compare=False)
    reasons: tuple[str, ...] = field(default=(), compare=False)


@dataclass
class RolloutResult:
    """What became of a task. `error` is set when its last attempt failed; the group is then a rejected one.

    `encoded` holds the samples as they will be uploaded, if they were checked (`upweight.rollout.validation`);
    `reasons` says why attempts failed, one code for each.
    """

    task: Task[Any]
    sample_group: SampleGroup
    starting_inference_version: int | None = field(default=None, compare=False)
    error: BaseException | None = field(default=None, compare=False)
    retries: int = field(default=0, compare=False)
    encoded: list[Any] | None = field(default=None, compare=False, repr=False)
    reasons: tuple[str, ...] = field(default=(), compare=False)
