"""Rollouts from a model that generates in this process.

What is sampled with top-k or top-p has `old_log_probs` of the whole tempered distribution, which is what the trainers compute
again, and `sampler_log_probs` of the one that was drawn from.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from upweight.errors import BatchError, ConfigError
from upweight.ops.returns import gae
from upweight.ops.sampling import apply_filters
from upweight.training.rl.adapters import mask_of, valid_targets
from upweight.training.rl.checks import Array, as_array
from upweight.training.rl.compiled import call
from upweight.training.rl.policy_gradient import token_rewards
from upweight.training.rl.rewards import as_reward_model
from upweight.training.rl.types import (
    GeneratedBatch,
    GeneratedSequenceBatch,
    GroupRolloutBatch,
    SequenceGenerationRequest,
    SequenceRolloutBatch,
)


class LocalSequenceGenerationBackend:
    """Calls `model.generate(total_samples, temperature=, [top_k=, top_p=,] prompt_tokens=, max_new_tokens=)`.

    Prompts are repeated, all generations of one prompt in a row. Without prompts `max_length=` takes the place of
    `max_new_tokens=`. A request's `seed`, `eos_id`, `pad_id` and `prompt_mask` are passed when given and accepted by
    `generate`; a seed that is not accepted is refused. `generate_fn` is called instead of `model.generate`.
    """

    def __init__(
        self,
        model: Any,
        *,
        generate_fn: Callable[..., Array] | None = None,
        prompt_kwarg: str = "prompt_tokens",
        conditioning_kwarg: str | None = None,
    ) -> None:
        self.model = model
        self.prompt_kwarg = prompt_kwarg
        self.conditioning_kwarg = conditioning_kwarg
        self._generate = model.generate if generate_fn is None else generate_fn
        self._checked: set[tuple[int, ...]] = set()

    def generate_sequences(self, request: SequenceGenerationRequest) -> GeneratedSequenceBatch:
        """Sequences with their masks; `BatchError` (a ValueError) when the model returned something else."""
        each = request.num_generations
        prompts = None if request.prompts is None else jnp.repeat(request.prompts, each, axis=0)
        prompt_mask = None if request.prompt_mask is None else jnp.repeat(request.prompt_mask, each, axis=0)
        conditioning, metadata = (
            jax.tree.map(lambda x: jnp.repeat(jnp.asarray(x), each, axis=0), tree)
            for tree in (request.conditioning, request.generation_metadata)
        )
        kwargs = self._arguments(request, prompts, prompt_mask, conditioning)
        sequences = as_array("sequences", self._generate(request.total_samples, **kwargs))
        self._check(sequences, request, prompts, prompt_mask)
        prompt_part = jnp.zeros(sequences.shape, jnp.float32)
        if prompts is not None:
            real = jnp.ones(prompts.shape) if prompt_mask is None else prompt_mask
            prompt_part = prompt_part.at[:, : request.prompt_length].set(jnp.asarray(real, jnp.float32))
        return GeneratedSequenceBatch(
            GeneratedBatch(sequences, conditioning=conditioning, generation_metadata=metadata),
            prompt_mask=prompt_part,
            response_mask=response_mask(sequences, request.prompt_length, request.eos_id),
        )

    def _arguments(
        self, request: SequenceGenerationRequest, prompts: Any, prompt_mask: Any, conditioning: Any
    ) -> dict[str, Any]:
        kwargs: dict[str, Any] = {"temperature": request.temperature}
        kwargs |= {name: x for name in ("top_k", "top_p") if (x := getattr(request, name)) is not None}
        if prompts is None:
            kwargs["max_length"] = request.max_new_tokens
        else:
            kwargs |= {self.prompt_kwarg: prompts, "max_new_tokens": request.max_new_tokens}
        if self.conditioning_kwarg is not None and conditioning is not None:
            kwargs[self.conditioning_kwarg] = conditioning
        for name, value in (("eos_id", request.eos_id), ("pad_id", request.pad_id), ("prompt_mask", prompt_mask)):
            if value is not None and self._accepts(name):
                kwargs[name] = value
        return kwargs | self._seed(request.seed)

    def _seed(self, seed: int | None) -> dict[str, Any]:
        if seed is None:
            return {}
        names = inspect.signature(self._generate).parameters
        if "key" in names and "seed" not in names:
            return {"key": jax.random.key(seed)}
        if self._accepts("seed"):
            return {"seed": seed}
        raise ConfigError(
            f"seed is {seed}, but generate takes neither seed nor key; add one to it, or leave the seed out"
        )

    def _accepts(self, name: str) -> bool:
        parameters = inspect.signature(self._generate).parameters.values()
        return any(p.name == name or p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)

    def _check(self, sequences: Any, request: SequenceGenerationRequest, prompts: Any, prompt_mask: Any) -> None:
        if sequences.ndim != 2:
            raise BatchError(f"sequences has shape {tuple(sequences.shape)}, generate must return 2-D sequences")
        if sequences.shape[0] != request.total_samples:
            raise BatchError(f"sequences has {sequences.shape[0]} rows, {request.total_samples} were asked for")
        if sequences.shape[1] < request.prompt_length:
            raise BatchError(
                f"sequences has {sequences.shape[1]} tokens a row, fewer than the {request.prompt_length} of the prompt"
            )
        # What was seen to keep its prompts at one shape is trusted to go on so: the check waits for the device.
        if prompts is None or sequences.shape in self._checked:
            return
        same = np.asarray(sequences)[:, : request.prompt_length] == np.asarray(prompts)
        if prompt_mask is not None:
            same |= np.asarray(prompt_mask) == 0
        if not same.all():
            raise BatchError(
                f"row {int(np.flatnonzero(~same.all(axis=1))[0])} of sequences does not begin with its prompt"
            )
        self._checked.add(tuple(sequences.shape))


def response_mask(sequences: jax.Array, prompt_length: int, eos_id: int | None) -> jax.Array:
    """float32 (B,S): 1 after the prompt up to and including the first end token."""
    answer = jnp.broadcast_to(jnp.arange(sequences.shape[1]) >= prompt_length, sequences.shape)
    if eos_id is None:
        return answer.astype(jnp.float32)
    ended = jnp.cumsum((sequences == eos_id) & answer, axis=1)
    before = jnp.pad(ended, ((0, 0), (1, 0)))[:, :-1]
    return (answer & (before == 0)).astype(jnp.float32)


class LocalSequenceRolloutBackend:
    """Generates, scores with the policy, and optionally with a reward model (or reward function) and a reference."""

    def __init__(
        self, generation_backend: Any, policy_adapter: Any, *, reward_model: Any = None, reference_scorer: Any = None
    ) -> None:
        self.generation_backend = generation_backend
        self.policy_adapter = policy_adapter
        self.reward_model = None if reward_model is None else as_reward_model(reward_model)
        self.reference_scorer = reference_scorer

    def generate_rollout(self, request: SequenceGenerationRequest) -> SequenceRolloutBatch:
        """`old_log_probs` at the request's temperature, `raw_log_probs` at 1; rewards and reference log-probs if there is
        something to make them."""
        batch = self.generation_backend.generate_sequences(request)
        # Greedy answers are scored under the model's own distribution.
        heat = request.temperature or 1.0
        temperature = None if heat == 1.0 else jnp.full(batch.batch_size, heat, jnp.float32)
        plain = SequenceRolloutBatch(batch)
        rollout = replace(plain, temperature=temperature)
        old = call(self.policy_adapter, "action_log_probs", rollout)
        raw = old if temperature is None else call(self.policy_adapter, "action_log_probs", plain)
        sampler = None
        if request.temperature > 0 and (request.top_k or (request.top_p or 1.0) < 1.0):
            sampler = filtered_log_probs(self.policy_adapter, rollout, request.top_k or 0, request.top_p or 1.0)
        made = batch.generation
        if self.reward_model is not None:
            made = replace(made, rewards=self.reward_model.score_generations(made))
        if self.reference_scorer is not None:
            made = replace(made, reference_log_probs=_reference(self.reference_scorer, rollout))
        return replace(
            rollout,
            sequence_batch=replace(batch, generation=made),
            old_log_probs=old,
            raw_log_probs=raw,
            sampler_log_probs=sampler,
        )

    def generate_grouped_rollout(self, request: SequenceGenerationRequest) -> GroupRolloutBatch[SequenceRolloutBatch]:
        """The generations of one prompt are a group."""
        return GroupRolloutBatch(rollout=self.generate_rollout(request), group_size=request.num_generations)


def filtered_log_probs(adapter: Any, rollout: SequenceRolloutBatch, top_k: int, top_p: float) -> jax.Array:
    """float32 (B,S−1) under the tempered distribution cut to top-k and top-p and renormalised; 0 where masked."""
    logp, mask = call(adapter, "log_prob_distributions", rollout), mask_of(rollout)
    rows, actions, size = logp.shape
    count = rows * actions
    flat = jnp.where(mask.reshape(-1, 1) > 0, logp.reshape(count, size), 0.0)
    kept = apply_filters(flat, jnp.full(count, top_k), jnp.full(count, top_p, jnp.float32), jnp.zeros(count))
    target = valid_targets(rollout.sequences[:, 1:], mask, size).reshape(-1, 1)
    chosen = jnp.take_along_axis(jax.nn.log_softmax(kept, axis=-1), target, axis=-1)
    return jnp.where(mask > 0, chosen.reshape(rows, actions), 0.0)


def with_advantages(
    rollout: SequenceRolloutBatch, value_adapter: Any, *, gamma: float = 0.99, gae_lambda: float = 0.95
) -> SequenceRolloutBatch:
    """The rollout with values, advantages and returns for PPO, from its token or sequence rewards; `BatchError` without any."""
    mask = mask_of(rollout)
    rewards = token_rewards(rollout, mask)
    if rewards is None:
        raise BatchError("the rollout has no token_rewards and no sequence rewards to compute advantages from")
    values = jnp.where(mask > 0, call(value_adapter, "action_values", rollout), 0.0)
    advantages = gae(rewards, values, mask, gamma, gae_lambda, rollout.dones)
    return replace(rollout, values=values, advantages=advantages, returns=advantages + values)


def _reference(scorer: Any, rollout: SequenceRolloutBatch) -> jax.Array:
    """(B,S−1) at the rollout's temperature, or (B,) from a scorer that knows whole sequences only."""
    if callable(getattr(scorer, "action_log_probs", None)):
        return call(scorer, "action_log_probs", rollout)
    return scorer.sequence_log_probs(rollout.sequence_batch)
