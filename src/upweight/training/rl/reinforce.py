"""REINFORCE: L = −agg(lp·R̂) − c_H·H (Williams 1992)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from upweight.errors import BatchError
from upweight.ops.grouped_advantages import grouped_advantages
from upweight.ops.masked_stats import masked
from upweight.ops.policy_loss import LOSSES, Limits
from upweight.ops.returns import at_last_action, discounted_returns
from upweight.training.rl.checks import Array, as_array
from upweight.training.rl.compiled import Metrics
from upweight.training.rl.configs import REINFORCEConfig
from upweight.training.rl.functions import normalize_advantages
from upweight.training.rl.inputs import UNWHITENED, Inputs, Totals
from upweight.training.rl.policy_gradient import RolloutTrainer, check_rollout, count_metrics, rollout_of
from upweight.training.rl.scoring import Places, score_actions
from upweight.training.rl.trainer import config_of


class REINFORCETrainer(RolloutTrainer[REINFORCEConfig]):
    """Trains on `SequenceRolloutBatch`: its returns, else its token rewards, else one reward a sequence.

    With `baseline="loo"` the others of a group are those of a `GroupRolloutBatch`, or the whole batch. Given returns are taken
    without a baseline.
    """

    def __init__(
        self,
        model: nnx.Module,
        optimizer: Any,
        config: REINFORCEConfig | None = None,
        *,
        policy_adapter: Any = None,
    ) -> None:
        super().__init__(model, optimizer, config_of(REINFORCEConfig, config, self), policy_adapter)

    def compute_returns(self, rewards: Array) -> jax.Array:
        """Discounted returns of rewards (T,) or (B,T), float32; `BatchError` for another rank."""
        rewards = as_array("rewards", rewards)
        if rewards.ndim not in (1, 2):
            raise BatchError(f"rewards has shape {tuple(rewards.shape)}, it must have one or two dimensions")
        rows = rewards if rewards.ndim == 2 else rewards[None]
        return discounted_returns(rows, jnp.ones(rows.shape), self.config.gamma).reshape(rewards.shape)

    def normalize_returns(self, returns: Array) -> jax.Array:
        """(R − mean)/(population std + 1e-8)."""
        return normalize_advantages(returns)

    def _checked(self, batch: Any) -> Any:
        check_rollout(batch, "REINFORCETrainer")
        rollout = rollout_of(batch)
        if rollout.returns is None and rollout.token_rewards is None and rollout.sequence_rewards is None:
            raise BatchError("the rollout has no returns, no token_rewards and no sequence rewards; give one of them")
        return batch

    def _prepare(self, model: Any, reference: Any, batch: Any) -> tuple[Inputs, Metrics]:
        rollout = rollout_of(batch)
        mask = rollout.action_mask
        returns = self._returns(rollout, mask, getattr(batch, "group_size", rollout.batch_size))
        name = UNWHITENED if self.config.normalize_returns else "advantages"
        return Inputs(rollout, mask, {name: returns}), {}

    def _returns(self, rollout: Any, mask: jax.Array, group_size: int) -> jax.Array:
        if rollout.returns is not None:
            return masked(rollout.returns.astype(jnp.float32), mask)
        gamma, baseline = self.config.gamma, self.config.baseline
        counts = jnp.max(mask, axis=1)
        formula = {"loo": "rloo", "batch": "group_centered"}.get(baseline)
        size = group_size if baseline == "loo" else rollout.batch_size
        if rollout.token_rewards is not None:
            rewards = masked(rollout.token_rewards.astype(jnp.float32), mask)
            returns = discounted_returns(rewards, mask, gamma, rollout.dones)
            if formula is None:
                return returns
            total = jnp.sum(rewards, axis=1)
            less = total - grouped_advantages(formula, total, counts, size).advantages
            return masked(returns - less[:, None], mask)
        reward = rollout.sequence_rewards
        if formula is not None:
            reward = grouped_advantages(formula, reward, counts, size).advantages
        return discounted_returns(at_last_action(reward, mask), mask, gamma, rollout.dones)

    def _loss(
        self, model: Any, reference: Any, inputs: Inputs, places: Places, totals: Totals
    ) -> tuple[jax.Array, Metrics]:
        coefficient = self.config.entropy_coeff
        scores = score_actions(self._bound("policy", model), inputs.batch, places, entropy=coefficient > 0)
        lp, returns = scores.log_probs, places.pick(inputs.arrays["advantages"])
        per_token = LOSSES["reinforce"](lp, lp, returns, places.trained, places.row, Limits())
        policy_loss = self._aggregated(per_token, inputs, places, totals)
        entropy = self._entropy(scores, inputs, places, totals)
        loss = policy_loss - coefficient * entropy
        metrics = {"policy_loss": policy_loss, "entropy": entropy, "total_loss": loss}
        return loss, jax.lax.stop_gradient(metrics | count_metrics(places, totals))
