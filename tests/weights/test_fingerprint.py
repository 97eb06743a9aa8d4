"""The name of a parameter tree's bits: what changes it, what does not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from upweight.weights.fingerprint import fingerprint


def tree(dtype: str = "float32") -> dict:
    rng = np.random.default_rng(0)

    def array(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape).astype(np.float32)).astype(dtype)

    return {"embed": array(16, 8), "norm": array(8), "layers": [{"o": array(8, 8), "down": array(8, 8)} for _ in "ab"]}


def with_embed(base: dict, array: np.ndarray) -> dict:
    return {**base, "embed": jnp.asarray(array)}


def words(array: jax.Array) -> np.ndarray:
    """A writable copy of the bits."""
    return np.array(array).view({2: np.uint16, 4: np.uint32}[array.dtype.itemsize])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_equal_content_in_new_arrays_keeps_it(dtype: str) -> None:
    params = tree(dtype)
    again = jax.tree.map(lambda x: jnp.array(np.array(x)), params)
    assert fingerprint(params) == fingerprint(again) == fingerprint(jax.tree.map(np.asarray, params))
    assert len(fingerprint(params)) == 32


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_flipped_bit_anywhere_changes_it(dtype: str) -> None:
    params = tree(dtype)
    seen = {fingerprint(params)}
    bits = 8 * params["embed"].dtype.itemsize
    for bit in range(bits):
        for row, column in ((0, 0), (7, 3), (15, 7)):
            flipped = words(params["embed"])
            flipped[row, column] ^= flipped.dtype.type(1 << bit)
            seen.add(fingerprint(with_embed(params, flipped.view(np.asarray(params["embed"]).dtype))))
    assert len(seen) == 1 + 3 * bits


@pytest.mark.parametrize(
    ("dtype", "bit"),
    [*(("float32", bit) for bit in (0, 1, 15, 22, 23, 29, 30, 31)), *(("bfloat16", bit) for bit in (0, 1, 7, 14, 15))],
)
def test_the_same_bit_flipped_in_two_places_changes_it(dtype: str, bit: int) -> None:
    """High bits are where sums modulo a power of two are weakest: two signs must not cancel."""
    params = tree(dtype)
    before = fingerprint(params)
    rng = np.random.default_rng(bit)
    for _ in range(20):
        places = rng.choice(128, 2, replace=False)
        flipped = words(params["embed"])
        flipped.reshape(-1)[places] ^= flipped.dtype.type(1 << bit)
        assert fingerprint(with_embed(params, flipped.view(np.asarray(params["embed"]).dtype))) != before


def test_negated_doubled_and_swapped_values_change_it() -> None:
    params = tree()
    embed = np.array(params["embed"])
    seen = [fingerprint(params)]

    def remember(array: np.ndarray) -> None:
        seen.append(fingerprint(with_embed(params, array)))

    for row in range(16):
        negated = embed.copy()
        negated[row] *= -1
        remember(negated)
    remember(-embed)
    remember(2 * embed)
    for i in range(16):
        for j in range(i):
            swapped = embed.copy()
            swapped[[i, j]] = swapped[[j, i]]
            remember(swapped)
    swapped = embed.copy()
    swapped[:, [0, 1]] = swapped[:, [1, 0]]
    remember(swapped)
    remember(np.ascontiguousarray(embed.T).reshape(embed.shape))
    assert len(set(seen)) == len(seen)


def test_a_value_swapped_with_its_negative_changes_it() -> None:
    params = tree()
    embed = np.array(params["embed"])
    embed[0, 0] = -embed[9, 5]
    swapped = embed.copy()
    swapped[0, 0], swapped[9, 5] = embed[9, 5], embed[0, 0]
    assert fingerprint(with_embed(params, embed)) != fingerprint(with_embed(params, swapped))


def test_tensors_swapped_left_out_renamed_or_reshaped_change_it() -> None:
    params = tree()
    first, second = params["layers"]
    variants = [
        params,
        {**params, "layers": [second, first]},
        {**params, "layers": [{"o": first["down"], "down": first["o"]}, second]},
        {**params, "layers": [first]},
        {**params, "layers": [{"o": first["o"]}, second]},
        {"embed": params["embed"], "layers": params["layers"]},
        {**params, "extra": jnp.zeros(0)},
        {"head": params["embed"], "norm": params["norm"], "layers": params["layers"]},
        {**params, "embed": params["embed"].reshape(8, 16)},
        {**params, "embed": jax.lax.bitcast_convert_type(params["embed"], jnp.uint32)},
    ]
    assert len({fingerprint(v) for v in variants}) == len(variants)


def test_its_value_is_fixed() -> None:
    """Recorded names are compared after a restart, by whatever version runs then."""
    params = {"a": jnp.arange(6, dtype=jnp.float32).reshape(2, 3), "b": [jnp.ones(2, jnp.bfloat16)]}
    assert fingerprint(params) == "0072069dcf0ed0c6cd3c037b85b3a9db"
