"""Work on parameter trees in pieces: what a piece is, and that its numbers are those of the whole."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from upweight.models.decoder import stack_layers
from upweight.training import pieces
from upweight.training.apply import make_apply
from upweight.training.optimizer import Optimizer
from upweight.training.pieces import add_trees, global_norm, pieces_of, stacked, unstacked


def tree(layers: int, seed: int = 0) -> dict[str, Any]:
    """Three arrays of 16 × 4 and 4 numbers a layer, and two outside."""
    draw = np.random.default_rng(seed)

    def array(*shape: int) -> jax.Array:
        return jnp.asarray(draw.standard_normal(shape), jnp.float32)

    block = [{"b": array(16, 4), "a": array(16, 4), "norm": array(4)} for _ in range(layers)]
    return {"embed": array(32, 4), "layers": block, "norm": array(4)}


@settings(max_examples=30, deadline=None)
@given(layers=st.integers(1, 9), room=st.integers(1, 6000))
def test_pieces_hold_every_leaf_once_and_whole_layers_up_to_the_limit(layers: int, room: int) -> None:
    before, pieces.PIECE_BYTES = pieces.PIECE_BYTES, room
    try:
        whole = tree(layers)
        found = pieces_of(whole)
    finally:
        pieces.PIECE_BYTES = before
    leaves = jax.tree_util.tree_leaves_with_path(whole)
    assert sorted(number for piece in found for number in piece) == list(range(len(leaves)))
    assert [str(leaves[number][0][0]) for number in found[0]] == ["['embed']", "['norm']"]
    for piece in found[1:]:
        mine = {leaves[number][0][1].idx for number in piece}
        assert len(piece) == 3 * len(mine)
        assert len(mine) == 1 or sum(leaves[number][1].nbytes for number in piece) <= room
    assert {len(piece) for piece in found[1:-1]} <= {len(found[1])}  # equal pieces share a program


def test_stacked_layers_come_apart_again() -> None:
    whole = tree(3)
    joined = stacked(whole)
    assert {name: array.shape for name, array in joined["layers"].items()} == {
        "b": (3, 16, 4),
        "a": (3, 16, 4),
        "norm": (3, 4),
    }
    jax.tree.map(np.testing.assert_array_equal, joined["layers"], stack_layers(whole["layers"]))
    assert stacked(joined) is joined
    jax.tree.map(np.testing.assert_array_equal, unstacked(joined), whole)


@pytest.mark.parametrize("max_norm", [None, 1.0, 1e9])
def test_an_update_in_pieces_is_the_one_of_optax(monkeypatch: pytest.MonkeyPatch, max_norm: float | None) -> None:
    monkeypatch.setattr(pieces, "PIECE_BYTES", 1200)  # two layers
    optimizer = Optimizer(optax.adamw(1e-2, weight_decay=0.1), max_norm)
    params, state = tree(5), optimizer.init(tree(5))
    expected, expected_state = params, optimizer.init(params)
    apply = make_apply(optimizer)
    for seed in (1, 2):
        grads = add_trees(tree(5, seed), tree(5, seed + 10))
        change, expected_state = optimizer.update(grads, expected_state, expected)
        expected = optax.apply_updates(expected, change)
        (params,), (state,), (norm,), applied = apply((params,), (state,), (grads,), jnp.float32(1.0))
        assert applied
        assert float(norm) == pytest.approx(float(optax.tree.norm(grads)), rel=1e-6)
        assert float(norm) == float(global_norm(grads))
        jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7), params, expected)
        jax.tree.map(
            lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7), state, expected_state
        )


@pytest.mark.parametrize(("loss", "bad"), [(float("nan"), 1.0), (1.0, float("inf"))])
def test_what_is_not_finite_changes_nothing(loss: float, bad: float) -> None:
    optimizer = Optimizer(optax.adamw(1e-2), 1.0)
    params = tree(2)
    state = optimizer.init(params)
    grads = dict(tree(2, 1), norm=jnp.full(4, bad))
    (after,), (state_after,), _, applied = make_apply(optimizer)((params,), (state,), (grads,), jnp.float32(loss))
    assert not applied
    assert after is params
    assert state_after is state
