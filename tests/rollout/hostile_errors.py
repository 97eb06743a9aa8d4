"""Exceptions that misbehave when they are looked at; at module level, so that they travel to worker processes."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from upweight.rollout.models import SampleGroup

from . import helpers


class TextLeaves(Exception):
    def __str__(self) -> str:
        sys.exit(4)


class PicklingLeaves(Exception):
    def __reduce__(self) -> Any:
        sys.exit(5)


class NoAttributes(Exception):
    def __getattribute__(self, name: str) -> Any:
        raise ValueError(f"no attribute {name}")


class AttributesLeave(Exception):
    def __getattribute__(self, name: str) -> Any:
        sys.exit(6)


class Loading(Exception):
    def __reduce__(self) -> Any:
        return (sys.exit, (7,))


@dataclass(frozen=True)
class Frozen(Exception):
    code: int = 1


KINDS = (TextLeaves, PicklingLeaves, NoAttributes, AttributesLeave, Loading, Frozen)
EVERY = 3


def rollout(task: int, context: Any) -> SampleGroup:
    """One failure of each kind."""
    if task % EVERY == 1 and task // EVERY < len(KINDS):
        raise KINDS[task // EVERY]
    return helpers.rollout(task, context)


async def rollout_async(task: int, context: Any) -> SampleGroup:
    return rollout(task, context)


def raise_attributes_leave(task: int, context: Any) -> SampleGroup:
    raise AttributesLeave


def raise_frozen(task: int, context: Any) -> SampleGroup:
    raise Frozen
