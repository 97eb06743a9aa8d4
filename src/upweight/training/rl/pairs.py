"""Preference batches as the DPO trainer takes them: checked, from a mapping if need be, and laid side by side."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from upweight.errors import BatchError, BatchTypeError, MissingBatchKey
from upweight.training.rl.checks import as_array, check_any_rows
from upweight.training.rl.padding import Shapes, pad_sequences
from upweight.training.rl.rollouts import action_mask
from upweight.training.rl.types import (
    GeneratedBatch,
    GeneratedSequenceBatch,
    PreferenceBatch,
    canonicalize_response_mask,
)

HALVES = ("chosen", "rejected")
Pair = PreferenceBatch[GeneratedSequenceBatch]


def from_mapping(batch: Mapping[str, Any]) -> tuple[Pair, list[str]]:
    """`{chosen, rejected, chosen_loss_mask | chosen_attention_mask, rejected_…}`, and which attention masks served as loss masks.

    Without a mask all tokens are scored. `MissingBatchKey` (a KeyError) without chosen or rejected.
    """
    halves, fallbacks = [], []
    for name in HALVES:
        if name not in batch:
            raise MissingBatchKey(f"the batch has no {name!r}; it needs chosen and rejected, it has {', '.join(batch)}")
        mask = batch.get(f"{name}_loss_mask")
        if mask is None and batch.get(f"{name}_attention_mask") is not None:
            mask = batch[f"{name}_attention_mask"]
            fallbacks.append(f"{name}_attention_mask")
        tokens = as_array(name, batch[name])
        if tokens.ndim != 2:
            raise BatchError(f"{name} has shape {tuple(tokens.shape)}, it must be (B, S)")
        whole = canonicalize_response_mask(tokens, mask)
        halves.append(GeneratedSequenceBatch.from_sequences(tokens, response_mask=whole))
    return PreferenceBatch(*halves), fallbacks


def check_pairs(batch: Any) -> None:
    """Halves are sequences of integers with at least one scored token in each row; error naming half and row otherwise."""
    if not isinstance(batch, PreferenceBatch) or not all(
        isinstance(getattr(batch, name), GeneratedSequenceBatch) for name in HALVES
    ):
        raise BatchTypeError(
            f"DPOTrainer got a {type(batch).__name__}; it trains on PreferenceBatch of two GeneratedSequenceBatch, or a dict"
        )
    replace(batch)  # checks again what transformations may have changed, and leaves the batch alone
    for name in HALVES:
        half = getattr(batch, name)
        replace(half)
        if half.sequences.ndim != 2 or half.sequences.shape[1] < 2:
            raise BatchError(f"{name}.sequences has shape {tuple(half.sequences.shape)}, it must be (B, S) with S ≥ 2")
        if not jnp.issubdtype(half.sequences.dtype, jnp.integer):
            raise BatchTypeError(f"{name}.sequences has dtype {half.sequences.dtype}, trainers need integer token ids")
        check_any_rows(f"{name}.sequences", half.sequences)
        reference = half.reference_log_probs
        rows, length = half.sequences.shape
        if reference is not None and tuple(reference.shape) not in ((rows,), (rows, length - 1)):
            raise BatchError(
                f"{name}.reference_log_probs has shape {tuple(reference.shape)}, it must be {(rows, length - 1)} or {(rows,)}"
            )
        _check_scored(name, half)


def _check_scored(name: str, half: GeneratedSequenceBatch) -> None:
    masks = (half.response_mask, half.prompt_mask, half.generation.output_mask)
    if any(isinstance(mask, jax.core.Tracer) for mask in masks) or all(mask is None for mask in masks):
        return
    if any(isinstance(x, jax.Array) and not x.is_fully_addressable for x in masks):
        return
    scored = host_mask(half).any(axis=1)
    if not scored.all():
        row = int(np.flatnonzero(~scored)[0])
        raise BatchError(f"{name} row {row} has no scored token: its loss mask is 0 on every token after the first")


def host_mask(half: GeneratedSequenceBatch) -> np.ndarray:
    """bool (B,S−1) as `action_mask` has it, computed without the device, where each new shape would compile."""
    shape = tuple(half.sequences.shape)
    mask = np.ones(shape, bool)
    if half.response_mask is not None:
        mask = np.asarray(half.response_mask) != 0
    elif half.prompt_mask is not None:
        mask = np.asarray(half.prompt_mask) == 0
    if half.generation.output_mask is not None:
        mask = mask & (np.asarray(half.generation.output_mask) != 0)
    return mask[:, 1:]


def pad_pair(batch: Pair, shapes: Shapes) -> Pair:
    """Both halves of one common shape, one of few; the first shape is taken as it is."""
    longest = max(batch.chosen.sequences.shape[1], batch.rejected.sequences.shape[1])
    shape = shapes.fit(batch.batch_size, longest)
    if shape is None and batch.chosen.sequences.shape == batch.rejected.sequences.shape:
        return batch
    rows, length = shape or (batch.batch_size, longest)
    return PreferenceBatch(pad_sequences(batch.chosen, rows, length), pad_sequences(batch.rejected, rows, length))


def side_by_side(batch: Pair) -> tuple[GeneratedSequenceBatch, jax.Array]:
    """One batch of 2B rows, pair after pair with the chosen half first, and its action mask (2B,A).

    Shorter halves are padded on the right. Conditioning and metadata are kept where both halves have them in one form.
    """
    length = max(batch.chosen.sequences.shape[1], batch.rejected.sequences.shape[1])
    halves = batch.chosen, batch.rejected
    tokens = _interleaved([_widened(half.sequences, length) for half in halves])
    mask = _interleaved([_widened(action_mask(half), length - 1) for half in halves])
    response = jnp.pad(mask, ((0, 0), (1, 0)))
    generation = GeneratedBatch(
        outputs=tokens,
        conditioning=_both(batch.chosen.conditioning, batch.rejected.conditioning),
        generation_metadata=_both(batch.chosen.generation_metadata, batch.rejected.generation_metadata),
    )
    return GeneratedSequenceBatch(generation, response_mask=response), mask


def reference_scores(batch: Pair, *, mean: bool) -> jax.Array | None:
    """float32 (B,2) from `reference_log_probs`, when both halves have them: their masked sum or mean, or scores as given."""
    found = []
    for half in (batch.chosen, batch.rejected):
        given = half.reference_log_probs
        if given is None:
            return None
        if given.ndim == 2:
            mask = action_mask(half)
            total = jnp.sum(jnp.where(mask > 0, given.astype(jnp.float32), 0.0), axis=1)
            given = total / jnp.maximum(jnp.sum(mask, axis=1), 1.0) if mean else total
        found.append(given.astype(jnp.float32))
    return jnp.stack(found, axis=1)


def _widened(x: jax.Array, length: int) -> jax.Array:
    return jnp.pad(x, ((0, 0), (0, length - x.shape[1])))


def _interleaved(halves: list[jax.Array]) -> jax.Array:
    """(2B,…): rows of the two halves in turn."""
    return jnp.stack(halves, axis=1).reshape(-1, *halves[0].shape[1:])


def _both(chosen: Any, rejected: Any) -> Any:
    forms: list[Any] = [jax.tree.structure(half) for half in (chosen, rejected)]
    if forms[0] != forms[1]:
        return None
    return jax.tree.map(lambda a, b: _interleaved([jnp.asarray(a), jnp.asarray(b)]), chosen, rejected)
