"""What a compiled step works on: a batch with everything resolved that does not depend on the weights being trained."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from upweight.ops.masked_stats import masked, masked_normalize
from upweight.ops.packing import quarter_bucket
from upweight.ops.policy_loss import AGGREGATIONS
from upweight.training.rl.devices import Placement, on_host
from upweight.training.rl.scoring import Places, trained_places
from upweight.training.rl.sharing import layouts
from upweight.training.rl.sizes import Sizes

UNWHITENED = "unwhitened"


class Inputs(NamedTuple):
    """Rows that can be cut and shuffled: every array has them as its leading dimension."""

    batch: Any  # SequenceRolloutBatch, or a pair of halves for preferences
    mask: jax.Array  # float32 (B,A), or (B,2,A) of pairs; what the loss runs over
    arrays: dict[str, jax.Array]  # name → (B,…)


class Totals(NamedTuple):
    """Counts over the whole optimizer batch, float32 []."""

    tokens: Any
    sequences: Any  # rows, or pairs, with a trained token

    @classmethod
    def of(cls, mask: Any, xp: Any = jnp) -> Totals:
        flat = mask.reshape(mask.shape[0], -1) > 0
        return cls(xp.float32(xp.sum(flat)), xp.float32(xp.sum(xp.any(flat, axis=1))))

    def __add__(self, other: object) -> Totals:
        assert isinstance(other, Totals)
        return Totals(self.tokens + other.tokens, self.sequences + other.sequences)


def aggregate(name: str, x: jax.Array, places: Places, rows: int, totals: Totals, length: int | None) -> jax.Array:
    """The part that these places add to the loss aggregation `name` of the whole optimizer batch."""
    rule = AGGREGATIONS[name]
    count = rule.count(totals.tokens, totals.sequences, length or 1)
    return rule.numerator(x, places.trained, places.row, rows) / jnp.maximum(count, 1.0)


def token_mean(x: jax.Array, places: Places, totals: Totals) -> jax.Array:
    return jnp.sum(jnp.where(places.trained > 0, x, 0.0)) / jnp.maximum(totals.tokens, 1.0)


@jax.jit
def take_rows(inputs: Inputs, rows: jax.Array, live: jax.Array) -> Inputs:
    """The rows at the given indices; those not live stay out of the loss."""
    taken: Inputs = jax.tree.map(lambda x: x[rows], inputs)
    shape = (-1,) + (1,) * (taken.mask.ndim - 1)
    return taken._replace(mask=taken.mask * live.reshape(shape))


def whitened(several: list[Inputs]) -> list[Inputs]:
    """The arrays `unwhitened` become `advantages`, whitened over the masked places of all inputs as one batch.

    Fewer than two places stay as they are: one number alone has no spread to be measured by.
    """
    own = [inputs for inputs in several if UNWHITENED in inputs.arrays]
    if not own:
        return several
    flat = jnp.concatenate([inputs.arrays[UNWHITENED].reshape(-1) for inputs in own])
    mask = jnp.concatenate([inputs.mask.reshape(-1) for inputs in own])
    white = jnp.where(jnp.sum(mask) < 2, masked(flat, mask), masked_normalize(flat, mask))
    done, start = [], 0
    for inputs in several:
        arrays = dict(inputs.arrays)
        if arrays.pop(UNWHITENED, None) is not None:
            arrays["advantages"] = white[start : start + inputs.mask.size].reshape(inputs.mask.shape)
            start += inputs.mask.size
        done.append(inputs._replace(arrays=arrays))
    return done


def cut(
    inputs: Inputs,
    mask: np.ndarray,
    parts: list[np.ndarray],
    everywhere: bool,
    share: bool,
    placement: Placement | None,
    sizes: Sizes,
) -> list[tuple[Inputs, Places]]:
    """One piece for each list of rows, all of one shape, with the places of its trained actions.

    `mask` is that of the inputs, on the host; `everywhere` takes all places instead of the trained ones. `share` computes once
    what rows of a piece have in common, where that is worth it. With a placement pieces lie on its devices. `sizes` are those
    that earlier pieces had; these are no smaller, so that a shape that was met compiles nothing for having less in it.
    """
    size = max(len(part) for part in parts)
    whole = len(parts) == 1 and np.array_equal(parts[0], np.arange(mask.shape[0]))
    pieces, masks = [], []
    for part in parts:
        rows = np.zeros(size, np.int32)
        rows[: len(part)] = part
        live = np.arange(size) < len(part)
        pieces.append(inputs if whole else take_rows(inputs, rows, live.astype(np.float32)))
        own = mask[rows] * live.reshape((-1,) + (1,) * (mask.ndim - 1))
        masks.append(own.reshape(-1, own.shape[-1]))
    count = masks[0].size
    if not everywhere:
        trained = max(int((own > 0).sum()) for own in masks)
        count = sizes.places(masks[0].shape, min(count, quarter_bucket(trained)))
    places = [_places(own, count) for own in masks]
    if placement is not None:
        pieces, places = ([placement.put_rows(x) for x in several] for several in (pieces, places))
    laid = layouts(_tokens(inputs, parts, size), masks, sizes, placement) if share else None
    if laid is not None:
        places = [each._replace(layout=layout) for each, layout in zip(places, laid, strict=True)]
    return list(zip(pieces, places, strict=True))


def _tokens(inputs: Inputs, parts: list[np.ndarray], size: int) -> list[np.ndarray]:
    """[B,S] of each part on the host, filled up as its piece is."""
    whole = on_host(inputs.batch.sequences)
    rows = [np.pad(part, (0, size - len(part)), constant_values=0) for part in parts]
    return [whole[chosen].reshape(-1, whole.shape[-1]) for chosen in rows]


def _places(mask: np.ndarray, count: int) -> Places:
    if count < mask.size:
        return trained_places(mask, count)
    index = np.arange(mask.size, dtype=np.int32)
    return Places(index, index // mask.shape[1], mask.reshape(-1).astype(np.float32))


def split_evenly(rows: int, parts: int, multiple: int = 1) -> list[np.ndarray]:
    """Contiguous parts of ⌈rows / parts⌉ rows, or of the next multiple; fewer parts when there are not enough rows."""
    size = -(-rows // (parts * multiple)) * multiple
    return [np.arange(start, min(start + size, rows)) for start in range(0, rows, size)]
