"""Altered formulas are noticed (T12): each mutation of a line must make the named comparison with float64 fail.

A mutation replaces the code of the functions in place, so that every user of them is altered, and is taken back afterwards.
"""

import ast
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import pytest

from tests.ops import test_corrections, test_masked_stats, test_returns
from tests.training.rl import test_math, test_sft, test_sharing
from upweight.ops import (
    advantages,
    corrections,
    logprobs,
    masked_stats,
    policy_loss,
    preference_loss,
    returns,
    value_loss,
)
from upweight.training.rl import adapters, dpo, grpo, grpo_advantages, ppo, reinforce, rollouts, sft, sharing, update

MUTATIONS: list[tuple[ModuleType, str, str, Callable[[], None]]] = [
    # policy losses
    (policy_loss, "-jnp.minimum(ratio * advantage", "-jnp.maximum(ratio * advantage", lambda: test_math.test_grpo("dapo")),
    (policy_loss, "1 - limits.low, 1 + limits.high", "1 - limits.high, 1 + limits.low", lambda: test_math.test_grpo("dapo")),
    (policy_loss, "masked(lp, trained) - masked(old, trained)", "masked(old, trained) - masked(lp, trained)", lambda: test_math.test_grpo("mirrored")),
    (policy_loss, "jnp.where(advantage < 0, jnp.minimum", "jnp.where(advantage > 0, jnp.minimum", lambda: test_math.test_grpo("dual_clip")),
    (policy_loss, "jnp.exp(total / jnp.maximum(count, 1.0))", "jnp.exp(total)", lambda: test_math.test_grpo("gspo")),
    (policy_loss, "jax.lax.stop_gradient(jnp.minimum(jnp.exp", "(lambda x: x)(jnp.minimum(jnp.exp", lambda: test_math.test_grpo("cispo")),
    (policy_loss, "jnp.exp(-d) - 1.0 + d", "jnp.exp(d) - 1.0 - d", lambda: test_math.test_grpo("grpo")),
    (policy_loss, "0.5 * kl_k1", "1.0 * kl_k1", lambda: test_math.test_grpo("k2")),
    (policy_loss, "jnp.sum(total / jnp.maximum(count, 1.0))", "jnp.sum(total)", lambda: test_math.test_grpo("gspo")),
    # entropy, KL, log-probs
    (logprobs, "return -jnp.sum(p *", "return jnp.sum(p *", lambda: test_math.test_grpo("mirrored")),
    (logprobs, "jnp.where(p > 0, logp, 0.0) - jnp.where(p > 0, logq, 0.0)", "jnp.where(p > 0, logq, 0.0) - jnp.where(p > 0, logp, 0.0)", lambda: test_math.test_grpo("mirrored")),
    (adapters, "jnp.where(trained > 0, jnp.where(tokens < 0, size, tokens), 0)", "jnp.where(trained > 0, (tokens + 1) % size, 0)", lambda: test_math.test_grpo("dapo")),
    (rollouts, "mask = mask[:, 1:]", "mask = mask[:, :-1]", lambda: test_math.test_grpo("dapo")),
    # advantages
    (advantages, "(rewards - stats.mean) / (stats.std + EPS)", "(rewards - stats.mean)", lambda: test_math.test_grpo("grpo")),
    (advantages, "stats.count / xp.maximum(stats.count - 1, 1)", "stats.count / stats.count", lambda: test_math.test_grpo("rloo")),
    (grpo_advantages, "at_last_action(rewards, mask) - kl", "at_last_action(rewards, mask) + kl", lambda: test_math.test_kl_in_the_reward("reinforce_pp")),
    (grpo_advantages, "rewards - jnp.sum(kl, axis=1)", "rewards + jnp.sum(kl, axis=1)", lambda: test_math.test_kl_in_the_reward("rloo")),
    (masked_stats, "centered / jnp.sqrt(variance + eps)", "centered / (variance + eps)", test_masked_stats.test_values_and_slopes),
    # returns
    (returns, "reward + gamma * (1.0 - done) * after", "reward + gamma * after", test_returns.test_returns),
    (returns, "jnp.where(active > 0, here, after), here", "here, here", test_returns.test_returns),
    (returns, "gamma * gae_lambda * (1.0 - done)", "gamma * (1.0 - done)", test_returns.test_gae_with_and_without_a_last_value),
    (returns, "(1.0 - done) * next_value, 0.0) - value", "(1.0 - done) * next_value, 0.0) + value", test_returns.test_gae_with_and_without_a_last_value),
    # trainers
    (reinforce, "policy_loss - coefficient * entropy", "policy_loss + coefficient * entropy", lambda: test_math.test_reinforce({}, lambda: test_math.whitened(test_math.returns_of(test_math.terminal(test_math.REWARDS), 0.99)))),
    (ppo, "policy_loss + config.vf_coeff * value_loss", "policy_loss + 0.5 * config.vf_coeff * value_loss", lambda: test_math.test_ppo({})),
    (ppo, "found + masked(values, mask) if", "found - masked(values, mask) if", test_math.test_c23_ppo_computes_what_is_missing),
    (grpo, "config.beta * penalty", "-config.beta * penalty", lambda: test_math.test_grpo("grpo")),
    (grpo, "per_token * weight", "per_token / weight", lambda: test_math.test_grpo("is_cap")),
    (dpo, "ratios[:, 0] - ratios[:, 1]", "ratios[:, 1] - ratios[:, 0]", lambda: test_math.test_dpo("sigmoid")),
    (dpo, "own - ref, 0.0", "own, 0.0", lambda: test_math.test_dpo("sigmoid")),
    (sft, "-token_mean(scores.log_probs, places, totals)", "-jnp.mean(scores.log_probs)", test_sft.test_loss_gradient_and_accuracy),
    (logprobs, "jnp.argmax(logits", "jnp.argmin(logits", test_sft.test_loss_gradient_and_accuracy),
    (sharing, "row * width + column", "row * width", test_sharing.test_what_is_laid_out_and_when),
    (sharing, "place[packed.source[real]]", "packed.source[real]", test_sharing.test_what_is_laid_out_and_when),
    (preference_loss, "-(1 - share) * jax.nn.log_sigmoid(x) - share", "-(1 - share) * jax.nn.log_sigmoid(x) + share", lambda: test_math.test_dpo("smoothed")),
    (preference_loss, "1.0 / (2.0 * settings.beta)", "1.0 / settings.beta", lambda: test_math.test_dpo("ipo")),
    (preference_loss, "settings.beta * margin - settings.gamma", "settings.beta * margin + settings.gamma", lambda: test_math.test_dpo("simpo")),
    (value_loss, "jnp.maximum(plain, jnp.square(near", "jnp.minimum(plain, jnp.square(near", test_corrections.test_value_losses),
    (corrections, "jnp.minimum(weight, cap)", "jnp.maximum(weight, cap)", test_corrections.test_importance_weights_are_capped_and_carry_no_gradient),
    (update, "jnp.minimum(1.0, max_grad_norm / (norm + NORM_EPS))", "1.0 * (norm > 0)", lambda: clipping()),
]  # fmt: skip


def clipping() -> None:
    from tests.training.rl import small
    from upweight.training.rl import REINFORCEConfig, REINFORCETrainer

    model = small.Policy()
    trainer = REINFORCETrainer(model, small.optimizer(model, 1.0), REINFORCEConfig(max_grad_norm=1e-3))
    before = small.params(model)
    trainer.train_step(small.rollout(rewards=small.REWARDS))
    moved = np.sqrt(sum(((a - b) ** 2).sum() for a, b in zip(before, small.params(model), strict=True)))
    assert moved == pytest.approx(1e-3, rel=1e-2)


def functions(scope: dict[str, Any], module: str) -> dict[str, FunctionType]:
    """Qualified name → plain function, of those that the module defines; compiled ones by what they wrap."""
    found = {}
    for value in list(scope.values()):
        members = vars(value).values() if inspect.isclass(value) and value.__module__ == module else [value]
        for member in members:
            plain = getattr(member, "__wrapped__", member)
            if isinstance(plain, FunctionType) and plain.__module__ == module:
                found[plain.__qualname__] = plain
    return found


@contextmanager
def mutated(module: ModuleType, old: str, new: str) -> Iterator[None]:
    source = inspect.getsource(module)
    assert source.count(old) >= 1, old
    scope: dict[str, Any] = {"__name__": module.__name__, "__file__": module.__file__}
    exec(compile(ast.parse(source.replace(old, new, 1)), module.__file__ or "", "exec"), scope)
    fresh, mine = functions(scope, module.__name__), functions(vars(module), module.__name__)
    before = {name: function.__code__ for name, function in mine.items()}
    compiled = [x for x in vars(module).values() if hasattr(x, "clear_cache")]
    try:
        for name, function in mine.items():
            if len(function.__code__.co_freevars) == len(fresh[name].__code__.co_freevars):
                function.__code__ = fresh[name].__code__
        for each in compiled:
            each.clear_cache()
        yield
    finally:
        for name, function in mine.items():
            function.__code__ = before[name]
        for each in compiled:
            each.clear_cache()


def tiered() -> list[Any]:
    """Two in CI, the others in the soak tier: each compiles a step of its own."""
    return [
        pytest.param(*mutation, id=str(i), marks=pytest.mark.soak if i % 24 else pytest.mark.ci)
        for i, mutation in enumerate(MUTATIONS)
    ]


@pytest.mark.parametrize(("module", "old", "new", "check"), tiered())
def test_t12_mutations_are_noticed(module: ModuleType, old: str, new: str, check: Callable[[], None]) -> None:
    with mutated(module, old, new), pytest.raises(AssertionError):
        check()


def test_t12_a_mutation_is_noticed_and_taken_back() -> None:
    """One of the many of the other tiers."""
    with mutated(*MUTATIONS[1][:3]), pytest.raises(AssertionError):
        MUTATIONS[1][3]()
    MUTATIONS[1][3]()
