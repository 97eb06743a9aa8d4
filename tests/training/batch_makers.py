"""Batches for a decoder with 29 token ids, with behaviour log-probs from a plain forward pass of each sample alone."""

import functools
from dataclasses import replace

import jax
import numpy as np

from upweight.models.config import DecoderConfig
from upweight.models.decoder import Decoder
from upweight.models.layers import Params
from upweight.ops.samples import TrainBatch

PADDED = 48


@functools.partial(jax.jit, static_argnums=0)
def logits_of_rows(config: DecoderConfig, params: Params, tokens: jax.Array) -> jax.Array:
    return Decoder(config, params)(tokens)


def logprobs_alone(config: DecoderConfig, params: Params, batch: TrainBatch) -> np.ndarray:
    """Float32 [T]: log-probs of each sample run by itself at its temperature, 0 at its first token."""
    out = np.zeros(len(batch.token_ids), np.float32)
    for start, end in zip(batch.starts[:-1], batch.starts[1:], strict=True):
        ids = batch.token_ids[start:end]
        row = np.zeros((1, PADDED), np.int32)
        row[0, : len(ids)] = ids
        logits = np.asarray(logits_of_rows(config, params, row))[0, : len(ids) - 1].astype(np.float64)
        logits /= batch.temperature[start + 1 : end, None]
        logp = logits - np.log(np.exp(logits).sum(1, keepdims=True))
        out[start + 1 : end] = logp[np.arange(len(ids) - 1), ids[1:]]
    return out


def make_batch(
    samples: list[tuple[list[int], list[int]]],
    reward: list[float] | np.ndarray,
    *,
    temperature: float | list[float] = 1.0,
    group: list[int] | None = None,
) -> TrainBatch:
    """Samples given as (context, answer); all of the answer is trained."""
    n = len(samples)
    lengths = np.array([len(a) + len(b) for a, b in samples], np.int32)
    mask = np.array([m for a, b in samples for m in [0] * len(a) + [1] * len(b)], np.uint8)
    return TrainBatch(
        lengths=lengths,
        token_ids=np.array([t for a, b in samples for t in a + b], np.int32),
        logprobs=np.zeros(len(mask), np.float32),
        mask=mask,
        reward=np.asarray(reward, np.float32),
        group=np.arange(n, dtype=np.int32) if group is None else np.asarray(group, np.int32),
        temperature=np.repeat(np.broadcast_to(np.float32(temperature), n), lengths),
        raw_logprobs=np.full(len(mask), np.nan, np.float32),
        versions=np.where(mask > 0, 0, -1).astype(np.int32),
        filtered=np.zeros(len(mask), np.uint8),
        matched=np.ones(n, np.uint8),
    )


def sampled_by(config: DecoderConfig, params: Params, batch: TrainBatch) -> TrainBatch:
    """The batch as if `params` had sampled it."""
    exact = logprobs_alone(config, params, batch)
    return replace(batch, logprobs=np.where(batch.mask > 0, exact, 0).astype(np.float32))


def standard_samples(seed: int = 0) -> tuple[list[tuple[list[int], list[int]]], list[float]]:
    """Twelve samples: two contexts shared by four each, four loners, answers of 1 to 14 tokens; and their rewards."""
    rng = np.random.default_rng(seed)

    def ids(count: int) -> list[int]:
        return rng.integers(1, 29, count).tolist()

    contexts = [ids(13), ids(6)]
    samples = [(contexts[i % 2], ids(int(rng.integers(1, 15)))) for i in range(8)]
    samples += [(ids(int(rng.integers(1, 20))), ids(int(rng.integers(1, 15)))) for _ in range(4)]
    return samples, np.round(rng.normal(size=12), 2).tolist()


def standard_batch(config: DecoderConfig, params: Params, seed: int = 0, **options: object) -> TrainBatch:
    samples, reward = standard_samples(seed)
    return sampled_by(config, params, make_batch(samples, reward, **options))
