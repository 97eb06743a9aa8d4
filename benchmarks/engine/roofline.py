"""What the machine could do: products of a decode step alone, and reading the weights once."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from statistics import median

import jax
import jax.numpy as jnp
import numpy as np

from upweight.models.config import DecoderConfig
from upweight.models.layers import Params, head_matrix


def seconds(call: Callable[[], jax.Array], runs: int = 15) -> float:
    jax.block_until_ready(call())
    times = []
    for _ in range(runs):
        began = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - began)
    return median(times)


def roofline(config: DecoderConfig, params: Params) -> dict[str, float]:
    """Tokens per second that only the matrix products of a step with 32 rows allow, and only reading the weights with one row."""

    @jax.jit
    def products(params: Params, x: jax.Array) -> jax.Array:
        """Every product of a decode step, each fed by the one before, nothing else."""
        for layer in params["layers"]:
            x = x + (x @ layer["qkv"])[:, : config.q_size] @ layer["o"]
            x = x + (x @ layer["gate_up"])[:, : config.intermediate_size] @ layer["down"]
        return jnp.einsum("bh,vh->bv", x, head_matrix(params))

    dtype = params["embed"].dtype
    square = jnp.ones((2048, 2048), dtype)
    weight_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    multiply = jax.jit(jnp.matmul)
    per_step = seconds(lambda: products(params, jnp.ones((32, config.hidden_size), dtype)))
    read = host_read_speed() if jax.default_backend() == "cpu" else device_read_speed()
    return {
        "square_product_gflops": 2 * 2048**3 / seconds(lambda: multiply(square, square)) / 1e9,
        "step_product_gflops": 2 * config.num_params * 32 / per_step / 1e9,
        "read_gb_per_s": read / 1e9,
        "product_bound_tokens_per_s": 32 / per_step,
        "memory_bound_tokens_per_s": read / weight_bytes,
    }


def host_read_speed(runs: int = 10) -> float:
    """Bytes per second of all cores together summing an array far larger than the caches: the best of some runs."""
    cores = len(os.sched_getaffinity(0))
    parts = np.array_split(np.ones(128 * 2**20, np.float32), cores)
    speeds = []
    with ThreadPoolExecutor(cores) as pool:
        for _ in range(runs):
            began = time.perf_counter()
            list(pool.map(np.sum, parts))
            speeds.append(sum(part.nbytes for part in parts) / (time.perf_counter() - began))
    return max(speeds)


def device_read_speed() -> float:
    long, total = jnp.ones(512 * 2**20), jax.jit(jnp.sum)
    return long.nbytes / seconds(lambda: total(long))
