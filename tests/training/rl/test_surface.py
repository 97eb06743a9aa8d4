"""The public names, and the documented snippets run word for word."""

import ast
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from flax import nnx

from tests.training.rl import small
from upweight import training
from upweight.training import rl

# The published snippets of the RL trainers' guide, with only the import prefix changed.
IMPORTS = """
from flax import nnx
import optax

from upweight.training import {names}
from upweight.training.rl import (
    GeneratedBatch,
    GeneratedSequenceBatch,
    GroupRolloutBatch,
    PreferenceBatch,
    SequenceRolloutBatch,
)
"""
REINFORCE = """
model = PolicyModel(rngs=nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.adam(1e-4), wrt=nnx.Param)
trainer = REINFORCETrainer(model, optimizer, REINFORCEConfig())

rollout = SequenceRolloutBatch(
    sequence_batch=GeneratedSequenceBatch(
        generation=GeneratedBatch(outputs=token_sequences, rewards=sequence_rewards),
        response_mask=response_mask,
    ),
    token_rewards=token_rewards,
)

loss, metrics = trainer.train_step(rollout)
"""
PPO = """
trainer = PPOTrainer(model, optimizer, PPOConfig())

rollout = SequenceRolloutBatch(
    sequence_batch=GeneratedSequenceBatch(
        generation=GeneratedBatch(outputs=token_sequences),
        response_mask=response_mask,
    ),
    old_log_probs=old_log_probs,
    returns=returns,
    advantages=advantages,
    dones=dones,
)

loss, metrics = trainer.train_step(rollout)
"""
GRPO = """
trainer = GRPOTrainer(
    model,
    optimizer,
    GRPOConfig(num_generations=4),
    reference_model=reference_model,
)

rollout = SequenceRolloutBatch(
    sequence_batch=GeneratedSequenceBatch(
        generation=GeneratedBatch(outputs=token_sequences, rewards=sequence_rewards),
        response_mask=response_mask,
    ),
    old_log_probs=old_log_probs,
)
grouped_rollout = GroupRolloutBatch(rollout=rollout, group_size=4)

loss, metrics = trainer.train_step(grouped_rollout)
"""
DPO = """
trainer = DPOTrainer(
    model=model,
    reference_model=reference_model,
    optimizer=optimizer,
    config=DPOConfig(beta=0.1),
)

preference_batch = PreferenceBatch(
    chosen=GeneratedSequenceBatch.from_sequences(
        chosen_sequences,
        response_mask=chosen_loss_mask,
    ),
    rejected=GeneratedSequenceBatch.from_sequences(
        rejected_sequences,
        response_mask=rejected_loss_mask,
    ),
)

loss, metrics = trainer.train_step(preference_batch)
"""
LOOP = """
from upweight.training.callbacks import CallbackList

callbacks = CallbackList([])

for step, rollout in enumerate(rollout_stream):
    callbacks.on_batch_begin(None, step)
    loss, metrics = trainer.train_step(rollout)
    callbacks.on_batch_end(None, step, metrics)
"""

MIRRORED = {
    "REINFORCE": {"policy_loss", "entropy", "total_loss"},
    "PPO": {"policy_loss", "value_loss", "entropy", "total_loss"},
    "GRPO": {"policy_loss", "entropy", "kl_penalty", "total_loss", "advantages_mean", "advantages_std"},
    "DPO": {"dpo_loss", "reward_accuracy", "chosen_log_ratios", "rejected_log_ratios", "margin"},
}


class PolicyModel(small.Policy):
    def __init__(self, *, rngs: nnx.Rngs) -> None:
        super().__init__(critic=False)


def given() -> dict[str, Any]:
    model = small.Policy(critic=True)
    return {
        "PolicyModel": PolicyModel,
        "model": model,
        "reference_model": small.Policy(1, critic=True),
        "optimizer": small.optimizer(model),
        "token_sequences": small.tokens(),
        "sequence_rewards": small.REWARDS,
        "response_mask": small.RESPONSE,
        "token_rewards": small.MASK,
        "old_log_probs": small.old_log_probs(model),
        "returns": small.MASK,
        "advantages": np.cos(np.arange(24, dtype=np.float32)).reshape(4, 6),
        "dones": np.zeros_like(small.MASK),
        "chosen_sequences": small.tokens(),
        "rejected_sequences": small.tokens(seed=3),
        "chosen_loss_mask": small.RESPONSE,
        "rejected_loss_mask": small.RESPONSE,
    }


def run_snippet(kind: str, more: str = "", **names: Any) -> dict[str, Any]:
    scope = given() | names
    code = IMPORTS.format(names=f"{kind}Config, {kind}Trainer") + globals()[kind] + more
    exec(compile(ast.parse(code), f"<{kind}>", "exec"), scope)
    return scope


@pytest.mark.parametrize("kind", MIRRORED)
def test_the_snippets_run(kind: str) -> None:
    scope = run_snippet(kind)
    assert np.isfinite(scope["loss"])
    assert MIRRORED[kind] <= scope["metrics"].keys()
    assert all(np.isfinite(x) for x in scope["metrics"].values())
    assert scope["metrics"]["update_skipped"] == 0


def test_the_documented_loop_runs() -> None:
    stream = [small.rollout(token_rewards=small.MASK)] * 2
    assert "metrics" in run_snippet("REINFORCE", LOOP, rollout_stream=stream)


def test_names_are_importable_from_both_places() -> None:
    for name in rl.__all__:
        assert getattr(training, name) is getattr(rl, name)
    for name in ("GradientAccumulator", "DynamicLossScaler", "GradientAccumulatorConfig", "DynamicLossScalerConfig"):
        assert getattr(training, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'GRPO'"):
        training.GRPO  # noqa: B018
    from upweight.training.rl import adapters, protocols, types

    for module, name in (
        (protocols, "SequenceGeneratingModule"),
        (adapters, "extract_logits_from_output"),
        (adapters, "extract_values_from_output"),
        (types, "canonicalize_response_mask"),
        (types, "prepare_autoregressive_token_mask"),
    ):
        assert callable(getattr(module, name))


def test_importing_brings_neither_checkpoints_nor_trackers() -> None:
    code = (
        "import sys, upweight.training.rl, upweight.training.gradients, upweight.training.callbacks;"
        "print([m for m in ('orbax', 'wandb', 'tensorboardX', 'mlflow', 'torch') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
