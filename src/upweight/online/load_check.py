"""Do engine and trainer compute the same? A few tokens, drawn by the one and scored by the other, right after loading.

A wrong weight layout, scaling or mask on either side gives plausible text and no learning; here it is an error at the start.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import numpy as np

from upweight.errors import ModelError
from upweight.inference.engine import Engine
from upweight.inference.gather import answers_to
from upweight.inference.metrics import EngineMetrics
from upweight.inference.types import GenerationOutput, SamplingParams
from upweight.ops.samples import TrainBatch
from upweight.training.policy_trainer import PolicyTrainer
from upweight.training.settings import LoraSettings, PolicySettings

MAX_GAP = 1e-3  # float32 products on a CPU: the largest difference of a log-prob
MEAN_GAP = 0.1  # elsewhere (TF32 or bfloat16 products): the mean difference
_PROMPT_TOKENS, _DRAWN_TOKENS, _ROWS = 12, 4, 2


@dataclass(frozen=True, kw_only=True)
class LoadCheck:
    """What was compared."""

    tokens: int
    largest: float  # |engine − trainer| of a log-prob
    mean: float


def check_loaded(engine: Engine, trainer: PolicyTrainer | None = None) -> LoadCheck:
    """Compares the engine with the trainer's forward pass (of `trainer`'s own trainable tree, if there is one).

    `ModelError` naming both numbers when the largest difference is above 1e-3 (float32 on a CPU) or the mean one above 0.1
    (otherwise), or when one of them is not finite. The engine runs, and nobody else uses it yet.
    """
    prompts = _prompts(engine.config.vocab_size, engine.max_context)
    drawn = SamplingParams(max_tokens=_DRAWN_TOKENS, ignore_eos=True, seed=0)
    outputs = _uncounted(engine, prompts, [drawn] * _ROWS)
    failed = next((output for output in outputs if not output.token_ids), None)
    if failed is not None:
        raise ModelError(f"the engine cannot answer with the loaded model: {failed.error}")
    batch = _batch(prompts, outputs)
    if trainer is None:  # an adapter that changes nothing: no optimizer state of the size of the model
        trainer = PolicyTrainer(engine.config, engine.runner.params, PolicySettings(lora=LoraSettings(rank=1)))
    scores = trainer.score(batch)
    exact = jax.default_backend() == "cpu" and engine.runner.params["embed"].dtype == np.float32
    return compare(batch, scores, exact=exact)


def _uncounted(engine: Engine, prompts: list[list[int]], params: list[SamplingParams]) -> list[GenerationOutput]:
    """Answers that do not show in the engine's statistics: nobody was served."""
    counts, engine.metrics = engine.metrics, EngineMetrics()
    try:
        return answers_to(engine, prompts, params)
    finally:
        engine.metrics = counts


def compare(batch: TrainBatch, scores: np.ndarray, *, exact: bool) -> LoadCheck:
    """`batch.logprobs` are the engine's numbers, `scores` the trainer's."""
    places = np.flatnonzero(batch.mask)
    ours, theirs = batch.logprobs[places], scores[places]
    gaps = np.abs(ours - theirs)
    worst = int(np.argmax(np.where(np.isfinite(gaps), gaps, np.inf)))
    found = LoadCheck(tokens=len(places), largest=float(gaps[worst]), mean=float(gaps.mean()))
    value, limit, what = (found.largest, MAX_GAP, "each") if exact else (found.mean, MEAN_GAP, "their mean")
    if not value <= limit:
        raise ModelError(
            f"engine and trainer disagree on the loaded model: token {batch.token_ids[places[worst]]} has log-prob "
            f"{ours[worst]:.6f} in the engine and {theirs[worst]:.6f} in the trainer, {what} may differ by {limit}; "
            "the weights or the model's config are not read as they should be"
        )
    return found


def _prompts(vocab_size: int, context: int) -> list[list[int]]:
    """Ids from all over the vocabulary, longer than a small window, within the context."""
    count = max(1, min(_PROMPT_TOKENS, context - _DRAWN_TOKENS))
    step = 0.618034 * vocab_size
    return [[int((row + 1 + place * _ROWS) * step) % vocab_size for place in range(count)] for row in range(_ROWS)]


def _batch(prompts: list[list[int]], outputs: list[GenerationOutput]) -> TrainBatch:
    """What was drawn, as uploaded samples have it."""
    lengths = np.array([len(p) + len(o.token_ids) for p, o in zip(prompts, outputs, strict=True)], np.int32)
    mask = np.concatenate([[0] * len(p) + [1] * len(o.token_ids) for p, o in zip(prompts, outputs, strict=True)])
    total = len(mask)
    logprobs = np.zeros(total, np.float32)
    logprobs[mask > 0] = np.concatenate([o.raw_logprobs for o in outputs])
    return TrainBatch(
        lengths=lengths,
        token_ids=np.concatenate([p + o.token_ids for p, o in zip(prompts, outputs, strict=True)]).astype(np.int32),
        logprobs=logprobs,
        mask=mask.astype(np.uint8),
        reward=np.zeros(len(lengths), np.float32),
        group=np.arange(len(lengths), dtype=np.int32),
        temperature=np.ones(total, np.float32),
        raw_logprobs=logprobs,
        versions=np.where(mask > 0, 0, -1).astype(np.int32),
        filtered=np.zeros(total, np.uint8),
        matched=np.ones(len(lengths), np.uint8),
    )
