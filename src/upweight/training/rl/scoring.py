"""What a loss needs of a batch's actions, from one forward pass where one suffices.

Three ways, the first that fits:
* The model offers `hidden_states(tokens)` and `head(hidden)`: the head runs in rematerialised chunks and only at `places`, so no
  array of all logits exists. A critic of this kind offers `value_head(hidden)` too.
* Our adapters over the plain contract: one call of the model, logits and values from the same output.
* Adapters of others: their methods.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from upweight.errors import BatchTypeError
from upweight.ops.logprobs import Scores, entropies, hidden_scores, kl_divergences, logit_scores
from upweight.ops.masked_stats import masked
from upweight.training.rl.adapters import (
    Batch,
    SequencePolicyAdapter,
    SequenceValueHeadAdapter,
    has_halves,
    temperature_of,
    valid_targets,
)
from upweight.training.rl.extraction import align_values
from upweight.training.rl.sharing import Layout, takes_layout


class Places(NamedTuple):
    """N actions of a batch of B rows with A actions each."""

    index: Any  # int32 [N], row·A + action
    row: Any  # int32 [N]
    trained: Any  # float32 [N], 0 = padding or masked
    layout: Layout | None = None  # where the rows' tokens are computed, if not in the rows themselves

    def pick(self, x_BA: jax.Array) -> jax.Array:
        return x_BA.reshape(-1)[self.index]


class Wanted(NamedTuple):
    """What else than log-probs is asked for."""

    entropy: bool
    hits: bool


class ActionScores(NamedTuple):
    """float32 [N], 0 where not trained; None where not asked for."""

    log_probs: jax.Array
    entropy: jax.Array | None = None
    kl: jax.Array | None = None
    values: jax.Array | None = None
    hits: jax.Array | None = None  # 1 where the token is the likeliest


def all_places(mask_BA: jax.Array) -> Places:
    """Every action, for a mask whose values are not known while tracing."""
    rows, actions = mask_BA.shape
    index = np.arange(rows * actions, dtype=np.int32)
    return Places(index, index // max(actions, 1), mask_BA.reshape(-1))


def trained_places(mask_BA: np.ndarray, count: int) -> Places:
    """The trained actions of a known mask, filled up to `count` with the first action."""
    flat = np.flatnonzero(mask_BA > 0).astype(np.int32)
    index = np.zeros(count, np.int32)
    index[: len(flat)] = flat
    trained = np.zeros(count, np.float32)
    trained[: len(flat)] = mask_BA.reshape(-1)[flat]
    return Places(index, index // mask_BA.shape[1], trained)


def score_actions(
    policy: Any,
    batch: Batch,
    places: Places,
    *,
    entropy: bool = False,
    reference: Any = None,
    critic: Any = None,
    hits: bool = False,
) -> ActionScores:
    """Scores at `places`. `reference` is the adapter that an exact KL is taken to, `critic` the one that gives values.

    `hits` are None from an adapter of others that has no distributions.
    """
    wanted = Wanted(entropy, hits)
    if not _is_ours(policy):
        scores, values = _scores_of_methods(policy, batch, places, wanted, reference), None
    elif _has_head(policy) and not _needs_output(critic, policy):
        scores, values = _scores_of_hidden(policy, batch, places, wanted, reference, critic)
    else:
        scores, values = _scores_of_logits(policy, batch, places, wanted, reference, critic)
    if critic is not None and values is None:
        values = places.pick(critic.action_values(batch))
    return ActionScores(
        masked(scores.logprob, places.trained),
        *(None if x is None else masked(x, places.trained) for x in (scores.entropy, scores.kl, values, scores.hit)),
    )


def needs_all_places(policy: Any, critic: Any = None) -> bool:
    """Whether scores at few places cost as much as at all, because the whole logits are computed anyway."""
    return not (_is_ours(policy) and _has_head(policy)) or _needs_output(critic, policy)


def can_share(policy: Any, critic: Any = None) -> bool:
    """Whether what rows have in common can be computed once."""
    return not needs_all_places(policy, critic) and takes_layout(policy.model)


def _needs_output(critic: Any, policy: SequencePolicyAdapter) -> bool:
    """Whether the values stand only in the output of the model's call, which holds the logits as well."""
    if critic is None or not _is_our_critic(critic, policy):
        return False
    return critic.value_extractor is not None or not has_halves(policy.model, "value_head")


def _is_ours(adapter: Any) -> bool:
    mine, kind = SequencePolicyAdapter, type(adapter)
    return isinstance(adapter, mine) and all(
        getattr(kind, name) is getattr(mine, name) for name in ("action_log_probs", "log_prob_distributions", "logits")
    )


def _has_head(adapter: SequencePolicyAdapter) -> bool:
    is_plain = adapter.logits_extractor is None and adapter.model_kwargs_factory is None
    return is_plain and has_halves(adapter.model, "head")


def _is_our_critic(critic: Any, policy: SequencePolicyAdapter) -> bool:
    """Whether the values stand in the very output that the policy's logits come from."""
    mine = SequenceValueHeadAdapter
    return (
        isinstance(critic, mine)
        and type(critic).action_values is mine.action_values
        and critic.model is policy.model
        and critic.model_kwargs_factory is policy.model_kwargs_factory
    )


def _scores_of_hidden(
    policy: SequencePolicyAdapter, batch: Batch, places: Places, wanted: Wanted, reference: Any, critic: Any
) -> tuple[Scores, jax.Array | None]:
    whole = policy.hidden(batch, places.layout)
    hidden = _hidden_at(whole, places)
    target, temperature = _targets(batch, places, policy._vocabulary.size)
    heads = None
    if reference is not None and _is_ours(reference) and _has_head(reference):
        layout = places.layout if takes_layout(reference.model) else None
        other = jax.lax.stop_gradient(_hidden_at(reference.hidden(batch, layout), places._replace(layout=layout)))
        heads = (reference.model.head, other)
    elif reference is not None:
        logp = jax.lax.stop_gradient(_at_places(_distributions(reference, batch), places, shifted=False))
        heads = (lambda x: x, logp * temperature[:, None])  # divided by the temperature again
    scores = hidden_scores(policy.model.head, hidden, target, temperature, reference=heads, **wanted._asdict())
    values = None
    if critic is not None and _is_our_critic(critic, policy):
        if places.layout is None:
            rows, length = batch.sequences.shape
            values = places.pick(align_values(policy.model.value_head(whole), (rows, length)))
        else:
            values = policy.model.value_head(hidden).reshape(-1).astype(jnp.float32)
    return scores, values


def _scores_of_logits(
    policy: SequencePolicyAdapter, batch: Batch, places: Places, wanted: Wanted, reference: Any, critic: Any
) -> tuple[Scores, jax.Array | None]:
    shape = tuple(batch.sequences.shape)
    shared = critic is not None and _is_our_critic(critic, policy)

    def read(_: Any, output: Any) -> tuple[jax.Array, jax.Array | None]:
        return policy.extract(output, shape), critic.extract(output, shape) if shared else None

    logits, values = policy.read(batch, read, lambda both: both[0].shape[-1])
    target, temperature = _targets(batch, places, logits.shape[-1])
    others = None
    if reference is not None:
        whole = reference.logits(batch) if _is_ours(reference) else None
        others = (
            _at_places(whole, places)
            if whole is not None
            else _at_places(_distributions(reference, batch), places, shifted=False) * temperature[:, None]
        )
        others = jax.lax.stop_gradient(others)
    own = _at_places(logits, places)
    at_places = None if values is None else places.pick(values)
    return logit_scores(own, target, temperature, reference_NV=others, **wanted._asdict()), at_places


def _scores_of_methods(policy: Any, batch: Batch, places: Places, wanted: Wanted, reference: Any) -> Scores:
    log_probs = places.pick(jnp.asarray(policy.action_log_probs(batch), jnp.float32))
    hits = wanted.hits and callable(getattr(policy, "log_prob_distributions", None))
    if not wanted.entropy and reference is None and not hits:
        return Scores(log_probs)
    logp = _at_places(_distributions(policy, batch), places, shifted=False)
    kl = None
    if reference is not None:
        other = _at_places(_distributions(reference, batch), places, shifted=False)
        kl = kl_divergences(logp, jax.lax.stop_gradient(other))
    likeliest = jnp.argmax(logp, axis=-1) == places.pick(batch.sequences[:, 1:]) if hits else None
    hit = None if likeliest is None else likeliest.astype(jnp.float32)
    return Scores(log_probs, entropies(logp) if wanted.entropy else None, kl, hit)


def _distributions(adapter: Any, batch: Batch) -> jax.Array:
    if not callable(getattr(adapter, "log_prob_distributions", None)):
        raise BatchTypeError(
            f"{type(adapter).__name__} has no log_prob_distributions, which entropy and the exact KL need; "
            "set entropy_coeff to 0 and kl_estimator to k1, k2 or k3"
        )
    return jnp.asarray(adapter.log_prob_distributions(batch), jnp.float32)


def _at_places(x_BSX: jax.Array, places: Places, *, shifted: bool = True) -> jax.Array:
    """[N,X] of what stands at the places; masked ones are 0, chosen before any arithmetic.

    `shifted` arrays have S entries a row, one more than there are actions.
    """
    per_action = x_BSX[:, :-1] if shifted else x_BSX
    flat = per_action.reshape(-1, per_action.shape[-1])
    everything = isinstance(places.index, np.ndarray) and len(places.index) == flat.shape[0]
    chosen = flat if everything and (places.index == np.arange(flat.shape[0])).all() else flat[places.index]
    return jnp.where(places.trained[:, None] > 0, chosen, 0)


def _hidden_at(hidden: jax.Array, places: Places) -> jax.Array:
    """[N,H] of the tokens that predict the actions at the places."""
    if places.layout is None:
        return _at_places(hidden, places)
    at = places.layout.query[places.index]
    return jnp.where(places.trained[:, None] > 0, hidden.reshape(-1, hidden.shape[-1])[at], 0)


def _targets(batch: Batch, places: Places, size: int) -> tuple[jax.Array, jax.Array]:
    """Token ids and temperatures at the places."""
    tokens = places.pick(batch.sequences[:, 1:])
    return valid_targets(tokens, places.trained, size), temperature_of(batch)[places.row]
