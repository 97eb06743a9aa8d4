"""Small models and batches that the trainer tests share: few shapes, so that few programs are compiled."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from upweight.training.rl.types import GeneratedSequenceBatch, GroupRolloutBatch, SequenceRolloutBatch

VOCAB, WIDTH = 11, 6
ROWS, LENGTH = 4, 7


class Policy(nnx.Module):
    """Causal: a running mean of embeddings. Called as the contract says; `critic` adds values beside the logits."""

    def __init__(self, seed: int = 0, critic: bool = False) -> None:
        rngs = nnx.Rngs(seed)
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.mix = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.out = nnx.Linear(WIDTH, VOCAB, rngs=rngs)
        self.critic = nnx.Linear(WIDTH, 1, rngs=rngs) if critic else None

    def states(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        count = jnp.arange(1, tokens.shape[1] + 1, dtype=jnp.float32)[:, None]
        return jnp.tanh(self.mix(jnp.cumsum(x, axis=1) / count) + x)

    def __call__(self, tokens: jax.Array) -> Any:
        states = self.states(tokens)
        logits = self.out(states)
        return logits if self.critic is None else (logits, self.critic(states)[..., 0])


class Bigram(Policy):
    """Looks at the last token only, so that padding before it has no effect."""

    def states(self, tokens: jax.Array) -> jax.Array:
        return jnp.tanh(self.mix(self.embed(tokens)))


class HeadPolicy(Policy):
    """The same arithmetic in two halves, so that the head runs at trained positions only."""

    def hidden_states(self, tokens: jax.Array) -> jax.Array:
        return self.states(tokens)

    def head(self, hidden: jax.Array) -> jax.Array:
        return self.out(hidden)

    def value_head(self, hidden: jax.Array) -> jax.Array:
        return self.critic(hidden)  # type: ignore[misc]

    def __call__(self, tokens: jax.Array) -> Any:
        raise AssertionError("hidden_states and head are to be used")


def optimizer(model: nnx.Module, rate: float = 0.1) -> nnx.Optimizer:
    return nnx.Optimizer(model, optax.sgd(rate), wrt=nnx.Param)


def params(model: nnx.Module) -> list[np.ndarray]:
    return [np.asarray(x).copy() for x in jax.tree.leaves(nnx.state(model, nnx.Param))]


Arrays = dict[str, np.ndarray]


def arrays(model: Policy) -> Arrays:
    """The model's parameters in float64."""
    found = {
        "embed": model.embed.embedding,
        "mix": model.mix.kernel,
        "mix_bias": model.mix.bias,
        "out": model.out.kernel,
        "out_bias": model.out.bias,
    }
    if model.critic is not None:
        found |= {"critic": model.critic.kernel, "critic_bias": model.critic.bias}
    return {name: np.asarray(x[...], np.float64) for name, x in found.items()}


def states_of(p: Arrays, tokens: np.ndarray) -> np.ndarray:
    """The model's forward pass by numpy alone, in float64."""
    x = p["embed"][tokens]
    mean = np.cumsum(x, axis=1) / np.arange(1, tokens.shape[1] + 1)[:, None]
    return np.tanh(mean @ p["mix"] + p["mix_bias"] + x)


def logits_of(p: Arrays, tokens: np.ndarray) -> np.ndarray:
    return states_of(p, tokens) @ p["out"] + p["out_bias"]


def values_of(p: Arrays, tokens: np.ndarray) -> np.ndarray:
    return (states_of(p, tokens) @ p["critic"] + p["critic_bias"])[:, :-1, 0]


def slopes(loss: Callable[[Arrays], float], p: Arrays) -> Arrays:
    """Central differences of a loss of the parameters."""
    out = {}
    for name, array in p.items():
        flat = np.zeros(array.size)
        for i in range(array.size):
            ends = []
            for step in (1e-5, -1e-5):
                moved = array.copy().reshape(-1)
                moved[i] += step
                ends.append(loss({**p, name: moved.reshape(array.shape)}))
            flat[i] = (ends[0] - ends[1]) / 2e-5
        out[name] = flat.reshape(array.shape)
    return out


def check_step(trainer: Any, batch: Any, loss: Callable[[Arrays], float], **options: Any) -> dict[str, float]:
    """One step of plain gradient descent at rate 1 must lower the parameters by the slopes of the float64 loss."""
    before = arrays(trainer.model)
    got, metrics = trainer.train_step(batch, **options)
    np.testing.assert_allclose(float(got), loss(before), rtol=2e-5, atol=2e-6)
    after, want = arrays(trainer.model), slopes(loss, before)
    for name in before:
        np.testing.assert_allclose(before[name] - after[name], want[name], rtol=2e-3, atol=3e-6, err_msg=name)
    return {name: float(x) for name, x in metrics.items()}


def log_softmax(x: np.ndarray) -> np.ndarray:
    shifted = x - x.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def tokens(rows: int = ROWS, length: int = LENGTH, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB, (rows, length)).astype(np.int32)


# Responses of 4, 2, 3 and 4 tokens, one of them with a hole, as tool output makes it.
RESPONSE = np.array(
    [[0, 0, 0, 1, 1, 1, 1], [0, 0, 0, 1, 1, 0, 0], [0, 0, 1, 0, 1, 1, 0], [0, 0, 0, 1, 1, 1, 1]], np.float32
)
MASK = RESPONSE[:, 1:]
REWARDS = np.array([1.0, 0.0, 0.5, 2.0], np.float32)


def old_log_probs(model: Policy, shift: float = 0.3) -> np.ndarray:
    """Those of the model itself, moved about by up to `shift`."""
    lp = log_probs_of(logits_of(arrays(model), tokens()), tokens())
    return (lp + shift * np.sin(np.arange(lp.size)).reshape(lp.shape)).astype(np.float32)


def log_probs_of(logits: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    logp = log_softmax(logits)[:, :-1]
    return np.take_along_axis(logp, tokens[:, 1:, None].astype(int), axis=-1)[..., 0]


def rollout(**fields: Any) -> SequenceRolloutBatch:
    sequence_fields = {
        name: fields.pop(name) for name in ("rewards", "reference_log_probs", "prompt_mask") if name in fields
    }
    response = fields.pop("response_mask", RESPONSE)
    sequences = fields.pop("sequences", tokens())
    batch = GeneratedSequenceBatch.from_sequences(sequences, response_mask=response, **sequence_fields)
    return SequenceRolloutBatch(batch, **fields)


def answers(**fields: Any) -> GeneratedSequenceBatch:
    sequences = fields.pop("sequences", tokens())
    return GeneratedSequenceBatch.from_sequences(sequences, **{"response_mask": RESPONSE, **fields})


def grouped(group_size: int = 2, **fields: Any) -> GroupRolloutBatch[SequenceRolloutBatch]:
    return GroupRolloutBatch(rollout(**{"rewards": REWARDS, **fields}), group_size)
