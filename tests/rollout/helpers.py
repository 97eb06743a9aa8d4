"""Datasets and rollout functions for runner tests; at module level, so that they travel to worker processes."""

from __future__ import annotations

import itertools
import os
import random
import time

from upweight.rollout import RolloutConfig
from upweight.rollout.models import Sample, SampleGroup


class Counting:
    """Gives 0, 1, 2, …; `limit` items in all. `served` counts them."""

    def __init__(self, limit: int | None = None) -> None:
        self._numbers = itertools.count() if limit is None else iter(range(limit))
        self.served = 0

    def sample(self, n_samples: int) -> list[int]:
        items = list(itertools.islice(self._numbers, n_samples))
        self.served += len(items)
        return items


def config(**kw) -> RolloutConfig:
    base = {
        "job_id": "job-1",
        "model_name": "m",
        "batch_size": 4,
        "num_batches": 3,
        "num_samples_per_task": 1,
        "max_concurrency": 4,
        "status_polling_interval": 0.02,
        "job_init_timeout": 5,
        "shutdown_timeout": 2.0,
    }
    return RolloutConfig(**{**base, **kw})


def good_sample(**kw) -> Sample:
    base = {"token_ids": [1, 2, 3], "logprobs": [0.0, -0.1, -0.2], "mask": [0, 1, 1], "normalized_reward": 1.0}
    return Sample(**{**base, **kw})


def rollout(task, context):
    return SampleGroup(samples=[good_sample() for _ in range(context.config.num_samples_per_task)])


async def async_rollout(task, context):
    return rollout(task, context)


def slow_rollout(task, context):
    time.sleep(random.uniform(0, 0.02))
    return rollout(task, context)


def picky_rollout(task, context):
    """Rejects every third task and fails on every fifth."""
    time.sleep(random.uniform(0, 0.01))
    if task % 3 == 0:
        return SampleGroup(is_rejected=True)
    if task % 5 == 0:
        raise ValueError("no luck")
    return rollout(task, context)


def dying_rollout(task, context):
    """Kills its process on task 1."""
    if task == 1:
        os._exit(7)
    return rollout(task, context)


def always_dying_rollout(task, context):
    os._exit(7)


def hanging_rollout(task, context):
    """Task 0 never returns."""
    if task == 0:
        time.sleep(60)
    return rollout(task, context)


def pid_rollout(task, context):
    group = rollout(task, context)
    for sample in group.samples:
        sample.debug_info = {"pid": os.getpid(), "context": id(context)}
    return group


def unlucky_rollout(task, context):
    raise ValueError("no luck")


async def async_unlucky_rollout(task, context):
    raise ValueError("no luck")
