"""Prompts of groups computed once: the same loss, gradient and metrics as row by row, to 1e-5."""

import itertools
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from tests.training.rl import small
from tests.training.rl.conftest import Compilations
from tests.training.rl.trainers import assert_same
from upweight.models.config import DecoderConfig
from upweight.models.decoder import Decoder
from upweight.models.layers import Params
from upweight.training import (
    DPOConfig,
    DPOTrainer,
    GeneratedSequenceBatch,
    GroupRolloutBatch,
    GRPOConfig,
    GRPOTrainer,
    PPOTrainer,
    PreferenceBatch,
    SequenceRolloutBatch,
    SFTTrainer,
)
from upweight.training.rl.sharing import layouts, takes_layout
from upweight.training.rl.sizes import Sizes

GROUPS, SIZE, PROMPT, LENGTH = 2, 4, 9, 14


class ActorCritic(Decoder):
    def __init__(self, config: DecoderConfig, params: Params) -> None:
        super().__init__(config, params)
        self.critic = nnx.Linear(config.hidden_size, 1, rngs=nnx.Rngs(3))

    def value_head(self, hidden: jax.Array) -> jax.Array:
        return self.critic(hidden)


def rows(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Two prompts, one of them with padding in front, four answers each: of several lengths, one with a hole."""
    draw = np.random.default_rng(seed)
    tokens = draw.integers(0, 29, (GROUPS * SIZE, LENGTH)).astype(np.int32)
    tokens[:, :PROMPT] = np.repeat(np.random.default_rng(5).integers(0, 29, (GROUPS, PROMPT)), SIZE, axis=0)
    tokens[SIZE:, :3] = 0
    response = np.zeros(tokens.shape, np.float32)
    for row, length in enumerate((5, 2, 4, 5, 1, 5, 3, 5)):
        response[row, PROMPT : PROMPT + length] = 1
    response[5, PROMPT + 1] = 0
    return tokens, response


def rollout() -> SequenceRolloutBatch:
    tokens, response = rows()
    old = -2.0 + 0.5 * np.sin(np.arange(tokens.size - len(tokens), dtype=np.float32)).reshape(len(tokens), -1)
    sequences = GeneratedSequenceBatch.from_sequences(
        tokens, response_mask=response, rewards=np.arange(len(tokens), dtype=np.float32) % 3
    )
    return SequenceRolloutBatch(sequences, old_log_probs=old)


def made(kind: str, config: DecoderConfig, params: Params) -> tuple[Any, Any]:
    model = (ActorCritic if kind == "ppo" else Decoder)(config, params)
    optimizer = small.optimizer(model, 0.1)
    if kind == "ppo":
        return PPOTrainer(model, optimizer), rollout()
    if kind == "grpo":
        reference = Decoder(config, jax.tree.map(lambda x: 0.9 * x, params))
        settings = GRPOConfig(num_generations=SIZE, beta=0.2)
        return GRPOTrainer(model, optimizer, settings, reference), GroupRolloutBatch(rollout(), SIZE)
    halves = [GeneratedSequenceBatch.from_sequences(t, response_mask=m) for t, m in (rows(0), rows(1))]
    if kind == "sft":
        return SFTTrainer(model, optimizer), halves[0]
    reference = Decoder(config, jax.tree.map(lambda x: 0.9 * x, params))
    return DPOTrainer(model, reference, optimizer, DPOConfig()), PreferenceBatch(*halves)


@pytest.mark.parametrize(
    ("kind", "parts"),
    [("grpo", 2), pytest.param("ppo", 1, marks=pytest.mark.soak), pytest.param("dpo", 1, marks=pytest.mark.soak)],
)
def test_shared_prompts_change_nothing(kind: str, parts: int, config: DecoderConfig, params: Params) -> None:
    trainer, batch = made(kind, config, params)
    start, results = trainer.state_dict(), []
    for shared in (False, True):
        trainer.load_state_dict(start)
        trainer.share_prompts = shared
        loss, metrics = trainer.train_step(batch, num_microbatches=parts)
        results.append(({name: float(x) for name, x in metrics.items()}, small.params(trainer.model)))
        assert float(loss) == pytest.approx(metrics.get("total_loss", metrics.get("loss")))
    assert results[1][0] == pytest.approx(results[0][0], rel=1e-5, abs=1e-6)
    assert_same(results[1][1], results[0][1], rtol=1e-5, atol=2e-6)
    pieces, _, _ = trainer._pieces([batch], parts)
    computed = sum(places.layout.tokens.size for _, places in pieces)
    assert computed <= 0.8 * GROUPS * SIZE * LENGTH * (2 if kind == "dpo" else 1)


def test_a_trained_id_out_of_range_skips_the_update(config: DecoderConfig, params: Params) -> None:
    trainer, batch = made("sft", config, params)
    batch = jax.tree.map(lambda x: x, batch)
    tokens = np.asarray(batch.sequences).copy()
    tokens[0, PROMPT], tokens[1, -1] = 99, -7  # a trained one, and one behind the last trained one
    bad = GeneratedSequenceBatch.from_sequences(tokens, response_mask=batch.response_mask)
    assert float(trainer.train_step(bad)[1]["update_skipped"]) == 1
    tokens[0, PROMPT] = 3
    good = GeneratedSequenceBatch.from_sequences(tokens, response_mask=batch.response_mask)
    assert float(trainer.train_step(good)[1]["update_skipped"]) == 0


def test_what_is_laid_out_and_when() -> None:
    """Two rows of one context: it stands once, and both first answers are asked of its last token."""
    tokens = np.array([[1, 2, 3, 4, 5, 0], [1, 2, 3, 6, 7, 8]], np.int32)
    mask = np.array([[0, 0, 1, 1, 0], [0, 0, 1, 0, 1]], np.float32)
    wide, wide_mask = (np.repeat(x, 8, axis=0) for x in (tokens, mask))
    (layout,) = layouts([wide], [wide_mask], Sizes()) or (None,)
    assert layout is not None
    assert layout.tokens[0, :8].tolist() == [1, 2, 3, 4, 5, 4, 5, 4]
    assert layout.positions[0, :8].tolist() == [0, 1, 2, 3, 4, 3, 4, 3]
    query = layout.query.reshape(16, 5)
    assert query[0].tolist() == [0, 0, 2, 3, 0]
    assert query[15].tolist() == [0, 0, 2, 0, query[14, 4] + 3]
    distinct = np.arange(16 * 6).reshape(16, 6)
    assert layouts([distinct], [wide_mask], Sizes()) is None  # nothing in common


def test_plain_models_are_called_as_ever() -> None:
    assert not takes_layout(small.Policy())
    assert not takes_layout(small.HeadPolicy())
    assert takes_layout(Decoder.__new__(Decoder))


def answers_of(prompt: int, least: int, seed: int, rows: int = 8, length: int = 96) -> Any:
    """One shape, two groups; answers of `least` to all tokens that the prompt leaves."""
    draw = np.random.default_rng(seed)
    tokens = draw.integers(0, 29, (rows, length)).astype(np.int32)
    tokens[:, :prompt] = np.repeat(tokens[: rows // SIZE, :prompt], SIZE, axis=0)
    ends = prompt + draw.integers(least, length - prompt, rows, endpoint=True)
    at = np.arange(length)
    response = ((at >= prompt) & (at < ends[:, None])).astype(np.float32)
    sequences = GeneratedSequenceBatch.from_sequences(
        tokens, response_mask=response, rewards=np.arange(rows, dtype=np.float32) % 3
    )
    old = np.full((rows, length - 1), -3.0, np.float32)
    return GroupRolloutBatch(SequenceRolloutBatch(sequences, old_log_probs=old), SIZE)


def policy_alone(config: DecoderConfig, params: Params) -> GRPOTrainer:
    model = Decoder(config, params)
    return GRPOTrainer(model, small.optimizer(model), GRPOConfig.preset("dapo", num_generations=SIZE))


def test_less_in_a_batch_of_one_shape_compiles_nothing(
    config: DecoderConfig, params: Params, compilations: Compilations
) -> None:
    """After one batch that shares nothing worth it and one that shares, whatever is trained in others."""
    trainer = policy_alone(config, params)
    forms = []
    for step, (prompt, least) in enumerate([(10, 86), (48, 48), (80, 1), (64, 10), (10, 60), (12, 80), (90, 1)]):
        batch = answers_of(prompt, least, seed=step)
        before = compilations.total
        trainer.train_step(batch)
        assert step < 2 or compilations.total == before
        forms.append(trainer._pieces([batch], 1)[0][0][1].layout is not None)
    assert forms == [False, True, True, True, False, False, True]


def test_one_shape_has_few_sizes_which_only_grow(config: DecoderConfig, params: Params) -> None:
    trainer, found = policy_alone(config, params), []
    for seed in range(40):
        ((_, places),) = trainer._pieces([answers_of(5 + 2 * seed % 83, 1, seed)], 1)[0]
        found.append((len(places.index), None if places.layout is None else places.layout.tokens.shape))
    laid = [layout for _, layout in found if layout is not None]
    counts = [count for count, _ in found]
    assert len(laid) > 10
    assert counts == sorted(counts)
    assert all(a[0] <= b[0] and a[1] <= b[1] for a, b in itertools.pairwise(laid))
    assert len(set(found)) <= 8

    again = policy_alone(config, params)  # a trainer that goes on from a saved state pads as the one that was saved
    again.load_state_dict(trainer.state_dict())
    ((_, places),) = again._pieces([answers_of(90, 1, 0)], 1)[0]
    assert (len(places.index), places.layout.tokens.shape) == (counts[-1], laid[-1])
