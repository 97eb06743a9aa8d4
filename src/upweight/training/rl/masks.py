"""Masks over tokens (B,S) and over actions (B,S−1): action a is the choice of token a + 1."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from upweight.errors import BatchError
from upweight.training.rl.checks import Array, as_array, check_mask


def canonicalize_response_mask(sequences: Array, mask: Array | None) -> jax.Array | None:
    """A mask of the sequences' shape (B,S). One over actions (B,S−1) gets a column of zeros in front; None stays None."""
    check_mask("response_mask", mask)
    sequences, mask = as_array("sequences", sequences), as_array("response_mask", mask)
    if mask is None or mask.shape == sequences.shape:
        return mask
    rows, length = sequences.shape[:2]
    if mask.shape == (rows, length - 1):
        return jnp.concatenate([jnp.zeros((rows, 1), mask.dtype), mask], axis=1)
    raise BatchError(
        f"response_mask has shape {tuple(mask.shape)}, it must be {(rows, length)} or {(rows, length - 1)}"
    )


def prepare_autoregressive_token_mask(sequences: Array, mask: Array | None) -> jax.Array:
    """float32 (B,S−1) over actions from a mask (B,S) or (B,S−1); all ones for None."""
    whole = canonicalize_response_mask(sequences, mask)
    if whole is None:
        rows, length = as_array("sequences", sequences).shape[:2]
        return jnp.ones((rows, length - 1), jnp.float32)
    return jnp.asarray(whole[:, 1:] != 0, jnp.float32)
