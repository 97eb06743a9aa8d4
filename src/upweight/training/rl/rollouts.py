"""Sequences with what a policy update needs beside them.

Action a of a row is the choice of token `sequences[:, a+1]`, so S tokens have A = S − 1 actions.
"""

from __future__ import annotations

from typing import Generic, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from upweight.errors import BatchError
from upweight.training.rl.checks import Array, as_array, check_mask, check_positive, check_shape
from upweight.training.rl.generations import GeneratedSequenceBatch

T = TypeVar("T")

PER_ACTION = (
    "old_log_probs",
    "token_rewards",
    "returns",
    "advantages",
    "dones",
    "sampler_log_probs",
    "raw_log_probs",
)


@nnx.dataclass
class SequenceRolloutBatch(nnx.Pytree):
    """B sequences of S tokens with numbers for their A = S − 1 actions."""

    sequence_batch: GeneratedSequenceBatch = nnx.data()
    old_log_probs: Array | None = nnx.data(default=None)  # (B,A), of the policy that the ratio is against
    token_rewards: Array | None = nnx.data(default=None)  # (B,A)
    returns: Array | None = nnx.data(default=None)  # (B,A)
    advantages: Array | None = nnx.data(default=None)  # (B,A)
    dones: Array | None = nnx.data(default=None)  # (B,A), 1 = the episode ends with this action
    sampler_log_probs: Array | None = nnx.data(default=None)  # (B,A), of the sampler, where it is not `old_log_probs`
    raw_log_probs: Array | None = nnx.data(default=None)  # (B,A), of the sampler before temperature and filters
    values: Array | None = nnx.data(default=None)  # (B,A), or (B,S) with the value of the state after the last action
    temperature: Array | None = nnx.data(default=None)  # (B,), default 1
    valid: Array | None = nnx.data(default=None)  # bool (B,); False keeps a row out of loss and group statistics

    def __post_init__(self) -> None:
        shape = tuple(self.sequences.shape)
        if len(shape) != 2:
            raise BatchError(f"sequences has shape {shape}, a rollout needs 2-D sequences: batch, length")
        for name in PER_ACTION:
            array = as_array(name, getattr(self, name))
            check_shape(name, array, self.action_shape, "one number for each action: batch, length − 1")
            setattr(self, name, array)
        check_mask("valid", self.valid)
        for name in ("temperature", "valid"):
            array = as_array(name, getattr(self, name))
            check_shape(name, array, (shape[0],), "one number a row")
            setattr(self, name, array)
        self.values = as_array("values", self.values)
        if self.values is not None and tuple(self.values.shape) not in (shape, self.action_shape):
            raise BatchError(
                f"values has shape {tuple(self.values.shape)}, it must be {self.action_shape} or, with a last value, {shape}"
            )

    @property
    def batch_size(self) -> int:
        return self.sequence_batch.batch_size

    @property
    def sequences(self) -> Array:
        return self.sequence_batch.sequences

    @property
    def prompt_mask(self) -> Array | None:
        return self.sequence_batch.prompt_mask

    @property
    def response_mask(self) -> Array | None:
        return self.sequence_batch.response_mask

    @property
    def sequence_rewards(self) -> Array | None:
        return self.sequence_batch.rewards

    @property
    def action_shape(self) -> tuple[int, int]:
        return (self.sequences.shape[0], self.sequences.shape[1] - 1)

    @property
    def num_action_tokens(self) -> int:
        """A: actions of a row, trained or not."""
        return self.sequences.shape[1] - 1

    @property
    def action_mask(self) -> jax.Array:
        """float32 (B,A): which actions are trained."""
        return action_mask(self.sequence_batch, self.valid)


def action_mask(batch: GeneratedSequenceBatch, valid: Array | None = None) -> jax.Array:
    """float32 (B,S−1): the response mask, else what is not prompt, else everything; times output mask and valid rows."""
    if batch.response_mask is not None:
        mask = batch.response_mask != 0
    elif batch.prompt_mask is not None:
        mask = batch.prompt_mask == 0
    else:
        mask = jnp.ones(batch.sequences.shape, bool)
    if batch.generation.output_mask is not None:
        mask = mask & (batch.generation.output_mask != 0)
    mask = mask[:, 1:]
    if valid is not None:
        mask = mask & (valid != 0)[:, None]
    return jnp.asarray(mask, jnp.float32)


@nnx.dataclass
class GroupRolloutBatch(nnx.Pytree, Generic[T]):
    """A rollout whose rows come in groups: rows 0 … group_size − 1 are the first group, and so on."""

    rollout: T = nnx.data()
    group_size: int = nnx.static(default=1)

    def __post_init__(self) -> None:
        check_positive("group_size", self.group_size)
        check_whole_groups(self.rollout.batch_size, self.group_size)  # type: ignore[attr-defined]

    @property
    def batch_size(self) -> int:
        return self.rollout.batch_size  # type: ignore[attr-defined]

    @property
    def num_groups(self) -> int:
        return self.batch_size // self.group_size


def check_whole_groups(rows: int, group_size: int) -> None:
    """`BatchError` unless the rows are a whole number of groups, and not none."""
    if rows == 0 or rows % group_size:
        raise BatchError(f"batch size {rows} is not divisible into groups of {group_size}: a group is incomplete")
