"""PPO: L = −agg(min(ρÂ, clip(ρ, 1−ε, 1+ε_high)Â)) + c_v·agg((V−R)²) − c_H·H + kl_coeff·KL (Schulman et al. 2017)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from upweight.errors import BatchError
from upweight.ops.masked_stats import masked, masked_mean
from upweight.ops.policy_loss import KL_ESTIMATORS, LOSSES, Limits
from upweight.ops.returns import gae
from upweight.ops.value_loss import explained_variance, moments_of, squared_error
from upweight.training.rl.adapters import SequenceValueHeadAdapter
from upweight.training.rl.checks import Array, as_array
from upweight.training.rl.compiled import Metrics
from upweight.training.rl.configs import PPOConfig
from upweight.training.rl.functions import (
    compute_clipped_surrogate_loss,
    compute_gae_advantages,
    compute_masked_policy_entropy,
    compute_policy_entropy,
)
from upweight.training.rl.inputs import UNWHITENED, Inputs, Totals, token_mean
from upweight.training.rl.policy_gradient import (
    RolloutTrainer,
    check_rollout,
    count_metrics,
    old_log_probs,
    ratio_metrics,
    reference_log_probs,
    rollout_of,
    token_rewards,
)
from upweight.training.rl.scoring import Places, score_actions
from upweight.training.rl.trainer import config_of

# Means over the trained actions, from which the variances follow; they add up over parts of a batch.
MOMENTS = ("_return", "_return_squared", "_error", "_error_squared")


class PPOTrainer(RolloutTrainer[PPOConfig]):
    """Trains on `SequenceRolloutBatch` with `old_log_probs`, and `returns` and `advantages` or what they follow from.

    Missing ones are computed by GAE from token or sequence rewards and values; the values are the batch's, else those of the
    model. By default the model returns logits and values from one call.
    """

    def __init__(
        self,
        model: nnx.Module,
        optimizer: Any,
        config: PPOConfig | None = None,
        *,
        policy_adapter: Any = None,
        value_adapter: Any = None,
    ) -> None:
        self.value_adapter = SequenceValueHeadAdapter(model) if value_adapter is None else value_adapter
        others = {"value": self.value_adapter}
        super().__init__(model, optimizer, config_of(PPOConfig, config, self), policy_adapter, others)

    def compute_gae(self, rewards: Array, values: Array, dones: Array | None) -> jax.Array:
        """Advantages of rewards (T,) or (B,T), with values of T or T + 1 steps; float32."""
        rewards, values = as_array("rewards", rewards), as_array("values", values)
        gamma, lam = self.config.gamma, self.config.gae_lambda
        if rewards.ndim == 1:
            return compute_gae_advantages(rewards, values, dones, gamma, lam)
        if rewards.ndim != 2:
            raise BatchError(f"rewards has shape {tuple(rewards.shape)}, it must have one or two dimensions")
        rows, steps = rewards.shape
        if tuple(values.shape) not in ((rows, steps), (rows, steps + 1)):
            raise BatchError(
                f"values has shape {tuple(values.shape)}, it must be {(rows, steps)} or {(rows, steps + 1)}"
            )
        return gae(rewards, values, jnp.ones((rows, steps)), gamma, lam, as_array("dones", dones))

    def compute_clipped_loss(self, log_probs: Array, old_log_probs: Array, advantages: Array) -> jax.Array:
        """−mean min(ρA, clip(ρ, 1 ± clip_param)A)."""
        return compute_clipped_surrogate_loss(log_probs, old_log_probs, advantages, self.config.clip_param)

    def compute_value_loss(self, values: Array, returns: Array, mask: Array | None = None) -> jax.Array:
        """Mean of (V − R)², not halved."""
        values, returns = as_array("values", values), as_array("returns", returns)
        mask = jnp.ones(values.shape, jnp.float32) if mask is None else as_array("mask", mask)
        kept = masked(values.astype(jnp.float32), mask), masked(returns.astype(jnp.float32), mask)
        return masked_mean(squared_error(*kept), mask)

    def compute_entropy(self, log_probs: Array, mask: Array | None = None) -> jax.Array:
        """Mean entropy of log-prob distributions (…,V)."""
        return compute_policy_entropy(log_probs) if mask is None else compute_masked_policy_entropy(log_probs, mask)

    def update(
        self, rollout: Any, *, epochs: int = 1, minibatch_size: int | None = None, seed: int | None = None
    ) -> tuple[jax.Array, Metrics]:
        """Several updates from one rollout: `epochs` passes over minibatches of so many rows (None = all rows at once).

        Advantages are computed and whitened once, over the whole rollout. Rows are taken in order, or with a `seed` shuffled
        anew in every pass. Minibatches without a trained token make no update. Returns the mean loss and metrics of the
        updates; `update_skipped` is the share that was skipped.
        """
        return self._passes(rollout, epochs, minibatch_size, seed)

    def _checked(self, batch: Any) -> Any:
        check_rollout(batch, "PPOTrainer")
        rollout = rollout_of(batch)
        if old_log_probs(rollout) is None:
            raise BatchError("the rollout has no old_log_probs; PPO needs the log-probs of the policy that drew it")
        missing = [name for name in ("returns", "advantages") if getattr(rollout, name) is None]
        if missing and rollout.token_rewards is None and rollout.sequence_rewards is None:
            raise BatchError(
                f"the rollout has no {' and no '.join(missing)}, and no token_rewards or sequence rewards to compute them from"
            )
        if self.config.kl_coeff > 0 and reference_log_probs(rollout) is None:
            self._warn_once("kl", "kl_coeff > 0, but the batch has no reference_log_probs: the KL is left out")
        if self.config.value_clip is not None and rollout.values is None and not missing:
            self._warn_once("value_clip", "value_clip has no effect: the batch has no values to clip at")
        return batch

    def _prepare(self, model: Any, reference: Any, batch: Any) -> tuple[Inputs, Metrics]:
        rollout, config = rollout_of(batch), self.config
        mask = rollout.action_mask
        values = self._old_values(model, rollout)
        reference_lp = reference_log_probs(rollout) if config.kl_coeff > 0 else None
        arrays = {"old": old_log_probs(rollout), "reference": reference_lp, "values": values}
        advantages, returns = rollout.advantages, rollout.returns
        if values is not None and (advantages is None or returns is None):
            full = values if rollout.values is None else rollout.values
            found = gae(token_rewards(rollout, mask), full, mask, config.gamma, config.gae_lambda, rollout.dones)
            advantages = found if advantages is None else advantages
            returns = found + masked(values, mask) if returns is None else returns
        assert advantages is not None  # given, or there were values
        assert returns is not None
        name = UNWHITENED if config.whiten_advantages else "advantages"
        arrays |= {name: masked(advantages.astype(jnp.float32), mask)}
        arrays |= {"returns": masked(returns.astype(jnp.float32), mask)}
        return Inputs(rollout, mask, {name: x for name, x in arrays.items() if x is not None}), {}

    def _old_values(self, model: Any, rollout: Any) -> jax.Array | None:
        """float32 (B,A): the batch's, else the model's where advantages or returns must be computed; None otherwise."""
        if rollout.values is not None:
            return rollout.values[:, : rollout.num_action_tokens].astype(jnp.float32)
        if rollout.advantages is not None and rollout.returns is not None:
            return None
        return jax.lax.stop_gradient(self._bound("value", model).action_values(rollout))

    def _loss(
        self, model: Any, reference: Any, inputs: Inputs, places: Places, totals: Totals
    ) -> tuple[jax.Array, Metrics]:
        config = self.config
        with_values = config.vf_coeff > 0
        scores = score_actions(
            self._bound("policy", model),
            inputs.batch,
            places,
            entropy=config.entropy_coeff > 0,
            critic=self._bound("value", model) if with_values else None,
        )
        lp, trained = scores.log_probs, places.trained
        old = places.pick(inputs.arrays["old"]).astype(jnp.float32)
        high = config.clip_param if config.clip_param_high is None else config.clip_param_high
        limits = Limits(low=config.clip_param, high=high, dual_clip=config.dual_clip)
        per_token = LOSSES["clip"](lp, old, places.pick(inputs.arrays["advantages"]), trained, places.row, limits)
        policy_loss = self._aggregated(per_token, inputs, places, totals)
        value_loss, value_metrics = self._value_loss(scores.values, inputs, places, totals)
        entropy = self._entropy(scores, inputs, places, totals)
        loss = policy_loss + config.vf_coeff * value_loss - config.entropy_coeff * entropy
        metrics = {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy} | value_metrics
        if "reference" in inputs.arrays:
            ref = places.pick(inputs.arrays["reference"]).astype(jnp.float32)
            kl = self._aggregated(KL_ESTIMATORS[config.kl_estimator](lp, ref, trained), inputs, places, totals)
            loss, metrics = loss + config.kl_coeff * kl, metrics | {"kl_penalty": kl}
        metrics |= {"total_loss": loss} | count_metrics(places, totals)
        metrics |= ratio_metrics(lp, old, places, totals, config.clip_param, high)
        return loss, jax.lax.stop_gradient(metrics)

    def _value_loss(
        self, values: jax.Array | None, inputs: Inputs, places: Places, totals: Totals
    ) -> tuple[jax.Array, Metrics]:
        if values is None:
            return jnp.float32(0.0), {}
        limit, returns = self.config.value_clip, places.pick(inputs.arrays["returns"])
        moments = {MOMENTS[i]: token_mean(x, places, totals) for i, x in enumerate(moments_of(values, returns))}
        if limit is None or "values" not in inputs.arrays:
            return self._aggregated(squared_error(values, returns), inputs, places, totals), moments
        old = masked(places.pick(inputs.arrays["values"]), places.trained)
        loss = self._aggregated(squared_error(values, returns, old, limit), inputs, places, totals)
        outside = (jnp.abs(values - old) > limit).astype(jnp.float32)
        return loss, moments | {"value_clip_fraction": token_mean(outside, places, totals)}

    def _finished(self, metrics: Metrics) -> Metrics:
        """With `explained_variance` where it is defined, in place of the moments that it follows from."""
        moments = [metrics[name] for name in MOMENTS if name in metrics]
        shown = {name: x for name, x in metrics.items() if name not in MOMENTS}
        if not moments:
            return shown
        if any(isinstance(x, jax.core.Tracer) for x in moments):
            return shown | {"explained_variance": jnp.nan_to_num(explained_variance(*moments))}
        variance = explained_variance(*(np.asarray(x) for x in moments))
        return shown | ({"explained_variance": jnp.float32(variance)} if np.isfinite(variance) else {})
