"""GRPO and its family: L = agg(−min(ρÂ, clip(ρ, 1−ε, 1+ε_high)Â)) + β·KL − c_H·H, advantages relative to a group."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from upweight.errors import BatchError, BatchTypeError, ConfigError
from upweight.ops.corrections import importance_weight
from upweight.ops.policy_loss import KL_ESTIMATORS, LOSSES, Limits, sequence_ratio
from upweight.training.rl.adapters import SequencePolicyAdapter
from upweight.training.rl.checks import Array, as_array, check_positive
from upweight.training.rl.compiled import Metrics, call
from upweight.training.rl.configs import GRPOConfig
from upweight.training.rl.grpo_advantages import group_advantages, normalized_rewards, trained_mask
from upweight.training.rl.inputs import UNWHITENED, Inputs, Totals, token_mean
from upweight.training.rl.policy_gradient import (
    RolloutTrainer,
    check_rollout,
    count_metrics,
    old_log_probs,
    ratio_metrics,
    reference_log_probs,
)
from upweight.training.rl.rollouts import GroupRolloutBatch, SequenceRolloutBatch, check_whole_groups
from upweight.training.rl.scoring import Places, score_actions
from upweight.training.rl.trainer import config_of

RELATIVE = ("group", "rloo", "reinforce_pp_baseline")  # advantages that compare the rewards of a group
LOSS_OF_LEVEL = {"token": "clip", "sequence": "clip_sequence", "sequence_sum": "clip_sequence_term"}


class GRPOTrainer(RolloutTrainer[GRPOConfig]):
    """Trains on `GroupRolloutBatch[SequenceRolloutBatch]` with `old_log_probs` and one reward a sequence.

    Explicit `advantages` take the place of the group's. The KL is to the reference model or adapter when there is one, else to
    the batch's `reference_log_probs` (as k3 where `exact` is asked for), else 0 with a warning.
    """

    def __init__(
        self,
        model: nnx.Module,
        optimizer: Any,
        config: GRPOConfig | None = None,
        reference_model: Any = None,
        *,
        policy_adapter: Any = None,
        reference_adapter: Any = None,
    ) -> None:
        config = config_of(GRPOConfig, config, self)
        if config.loss_aggregation == "seq_mean_token_sum_norm" and config.max_response_length is None:
            raise ConfigError(
                "GRPOConfig.max_response_length is None; loss_aggregation 'seq_mean_token_sum_norm' divides by it, give a number"
            )
        if reference_adapter is None and reference_model is not None:
            reference_adapter = SequencePolicyAdapter(reference_model)
        self.reference_model = reference_model
        self.reference_adapter = reference_adapter
        super().__init__(model, optimizer, config, policy_adapter, reference=reference_adapter)

    def normalize_group_rewards(self, rewards: Array, group_size: int, eps: float = 1e-8) -> jax.Array:
        """(r − mean)/(std + eps) of contiguous groups, (B,), std by `std_ddof`; exactly 0 where a group has no variance."""
        rewards = as_array("rewards", rewards)
        if rewards.ndim != 1:
            raise BatchError(f"rewards has shape {tuple(rewards.shape)}, it must be (B,)")
        check_positive("group_size", group_size)
        check_whole_groups(rewards.shape[0], group_size)
        return normalized_rewards(rewards, group_size, self.config.std_ddof, eps)

    def update(
        self, batch: Any, *, epochs: int = 1, minibatch_size: int | None = None, seed: int | None = None
    ) -> tuple[jax.Array, Metrics]:
        """Several updates from one batch: `epochs` passes over minibatches of so many rows, whole groups (None = all rows at once).

        Advantages, and with `proximal="recomputed"` the centre of the clip, are those before the first update. Groups are taken
        in order, or with a `seed` shuffled anew in every pass. Minibatches without a trained token make no update. Returns the
        mean loss and metrics of the updates; `update_skipped` is the share that was skipped.
        """
        return self._passes(batch, epochs, minibatch_size, seed, unit=getattr(batch, "group_size", 1))

    def _fixed(self, inputs: Inputs) -> Inputs:
        """With the centre of the clip, which one update alone has in its own log-probs."""
        if self.config.proximal != "recomputed" or "old" in inputs.arrays:
            return inputs
        old = jnp.asarray(call(self.policy_adapter, "action_log_probs", inputs.batch), jnp.float32)
        return inputs._replace(arrays={**inputs.arrays, "old": old})

    def _checked(self, batch: Any) -> Any:
        if not isinstance(batch, GroupRolloutBatch) or not isinstance(batch.rollout, SequenceRolloutBatch):
            raise BatchTypeError(
                f"GRPOTrainer got a {type(batch).__name__}; wrap the rollout: GroupRolloutBatch(rollout=…, group_size=…)"
            )
        check_rollout(batch, "GRPOTrainer")
        rollout = batch.rollout
        if old_log_probs(rollout) is None and self.config.policy_loss != "reinforce":
            raise BatchError("the rollout has no old_log_probs; GRPO needs the log-probs of the policy that drew it")
        if rollout.sequence_rewards is None and rollout.advantages is None:
            raise BatchError(
                "the rollout has no sequence rewards (GeneratedBatch.rewards); GRPO compares them in a group"
            )
        self._warn_of(batch)
        return batch

    def _warn_of(self, batch: Any) -> None:
        config, rollout, size = self.config, batch.rollout, batch.group_size
        if rollout.token_rewards is not None:
            self._warn_once("token_rewards", "the batch's token_rewards are not used: GRPO takes one reward a sequence")
        relative = config.advantage in RELATIVE and rollout.advantages is None
        if size == 1 and relative:
            self._warn_once("group_size", "group_size is 1: a group of one has advantage 0 and teaches nothing")
        elif size != config.num_generations and relative:
            self._warn_once(
                "group_size", f"group_size is {size} and num_generations {config.num_generations}: the batch's is used"
            )
        self._warn_of_options(rollout)
        wanted = config.beta > 0 or (config.kl_in_reward and config.kl_coeff > 0)
        if wanted and self.reference_adapter is None and reference_log_probs(rollout) is None:
            self._warn_once(
                "reference",
                "a KL is asked for, but there is no reference model, adapter or reference_log_probs: it is 0",
            )

    def _warn_of_options(self, rollout: Any) -> None:
        """Options that the others, or what the batch lacks, leave without effect."""
        config = self.config
        old, sampler = old_log_probs(rollout) is not None, rollout.sampler_log_probs is not None
        if config.proximal == "batch":
            if config.is_cap is not None and not sampler:
                self._warn_once("is_cap", "is_cap has no effect: the batch has no sampler_log_probs")
            if config.is_mask is not None and not (sampler and old):
                missing = "sampler_log_probs" if old else "old_log_probs"
                self._warn_once("is_mask", f"is_mask has no effect: the batch has no {missing}")
        if config.kl_coeff > 0 and not config.kl_in_reward:
            self._warn_once("kl_coeff", "kl_coeff has no effect without kl_in_reward; beta is for the KL in the loss")
        if config.filter_flat_groups and (config.advantage not in RELATIVE or rollout.advantages is not None):
            self._warn_once("filter", "filter_flat_groups has no effect: no advantages of groups are computed")
        if config.policy_loss != "clip":
            if config.dual_clip is not None:
                self._warn_once("dual_clip", f"dual_clip has no effect: policy_loss {config.policy_loss!r} has none")
            if config.ratio_level != "token":
                self._warn_once("ratio_level", f"ratio_level has no effect with policy_loss {config.policy_loss!r}")

    def _prepare(self, model: Any, reference: Any, batch: Any) -> tuple[Inputs, Metrics]:
        config, rollout = self.config, batch.rollout
        mask = rollout.action_mask
        old = old_log_probs(rollout)
        sampler = rollout.sampler_log_probs
        if config.proximal == "recomputed":
            sampler = old if sampler is None else sampler
            old = None
            if config.is_mask is not None:
                policy = self._bound("policy", model)
                old = jax.lax.stop_gradient(jnp.asarray(policy.action_log_probs(rollout), jnp.float32))
        kept = trained_mask(config, rollout, mask, old, sampler)
        ref = self._reference_in_batch(reference, rollout)
        drawn = old if old is not None else sampler
        advantages, kept, extra = group_advantages(config, batch, mask, kept, drawn, ref)
        is_white = config.advantage in ("reinforce_pp", "reinforce_pp_baseline") and rollout.advantages is None
        arrays = {
            UNWHITENED if is_white else "advantages": advantages,
            "old": old,
            "sampler": sampler,
            "reference": ref,
        }
        return Inputs(rollout, kept, {name: x for name, x in arrays.items() if x is not None}), extra

    def _reference_in_batch(self, reference: Any, rollout: SequenceRolloutBatch) -> jax.Array | None:
        """Reference log-probs that are known before the policy is run: for a KL in the reward, or without a reference."""
        config = self.config
        if config.kl_in_reward and config.kl_coeff > 0 and self.reference_adapter is not None:
            adapter = self._bound_reference(reference)
            return jax.lax.stop_gradient(jnp.asarray(adapter.action_log_probs(rollout), jnp.float32))
        if self.reference_adapter is None and (config.beta > 0 or config.kl_in_reward):
            return reference_log_probs(rollout)
        return None

    def _loss(
        self, model: Any, reference: Any, inputs: Inputs, places: Places, totals: Totals
    ) -> tuple[jax.Array, Metrics]:
        config, arrays = self.config, inputs.arrays
        exact = config.beta > 0 and config.kl_estimator == "exact" and self.reference_adapter is not None
        scores = score_actions(
            self._bound("policy", model),
            inputs.batch,
            places,
            entropy=config.entropy_coeff > 0,
            reference=self._bound_reference(reference) if exact else None,
        )
        lp = scores.log_probs
        old = places.pick(arrays["old"]).astype(jnp.float32) if "old" in arrays else jax.lax.stop_gradient(lp)
        per_token, ratios = self._policy_loss(lp, old, inputs, places, totals)
        policy_loss = self._aggregated(per_token, inputs, places, totals)
        entropy = self._entropy(scores, inputs, places, totals)
        kl = scores.kl if exact else self._estimated_kl(lp, reference, inputs, places)
        penalty = jnp.float32(0.0) if kl is None else self._aggregated(kl, inputs, places, totals)
        loss = policy_loss + config.beta * penalty - config.entropy_coeff * entropy
        metrics = {"policy_loss": policy_loss, "entropy": entropy, "kl_penalty": penalty, "total_loss": loss}
        return loss, jax.lax.stop_gradient(metrics | count_metrics(places, totals) | ratios)

    def _policy_loss(
        self, lp: jax.Array, old: jax.Array, inputs: Inputs, places: Places, totals: Totals
    ) -> tuple[jax.Array, Metrics]:
        """Per token, corrected for the sampler, and the metrics of the ratio where there is one."""
        config, trained = self.config, places.trained
        high = config.clip_param if config.clip_param_high is None else config.clip_param_high
        limits = Limits(
            low=config.clip_param,
            high=high,
            dual_clip=config.dual_clip,
            cispo_max=config.cispo_max,
            num_samples=inputs.mask.shape[0],
        )
        name = LOSS_OF_LEVEL[config.ratio_level] if config.policy_loss == "clip" else config.policy_loss
        advantages = places.pick(inputs.arrays["advantages"])
        per_token = LOSSES[name](lp, old, advantages, trained, places.row, limits)
        metrics: Metrics = {}
        if config.policy_loss != "reinforce":
            level = config.ratio_level if config.policy_loss == "clip" else "token"
            ratio = None if level == "token" else sequence_ratio(lp, old, trained, places.row, limits, level)
            metrics = ratio_metrics(lp, old, places, totals, config.clip_param, high, ratio)
            if config.policy_loss == "cispo":  # clips no ratio, only its weight
                metrics = {name: x for name, x in metrics.items() if not name.startswith("clip_fraction")}
        if "sampler" in inputs.arrays and (config.is_cap is not None or config.proximal == "recomputed"):
            sampler = places.pick(inputs.arrays["sampler"]).astype(jnp.float32)
            weight = importance_weight(old, sampler, trained, config.is_cap)
            per_token = per_token * weight
            metrics |= {"is_weight_mean": token_mean(weight, places, totals)}
        return per_token, metrics

    def _estimated_kl(self, lp: jax.Array, reference: Any, inputs: Inputs, places: Places) -> jax.Array | None:
        """Per token, from the log-probs of the tokens alone; None where there is none to compute."""
        config = self.config
        if config.beta == 0:
            return None
        if "reference" in inputs.arrays:
            ref = places.pick(inputs.arrays["reference"]).astype(jnp.float32)
        elif self.reference_adapter is not None:
            scores = score_actions(self._bound_reference(reference), inputs.batch, places)
            ref = jax.lax.stop_gradient(scores.log_probs)
        else:
            return None
        name = "k3" if config.kl_estimator == "exact" else config.kl_estimator
        return KL_ESTIMATORS[name](lp, ref, places.trained)
