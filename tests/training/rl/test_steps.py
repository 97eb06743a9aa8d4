"""Steps: how often models run and programs compile, micro-batches, clipping, skipping, state: rows C05 … T6."""

import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import psutil
import pytest
from flax import nnx

from tests.training.rl import small, trainers
from tests.training.rl.conftest import Compilations
from tests.training.rl.small import HeadPolicy, Policy, params
from tests.training.rl.trainers import ALL, OTHER, assert_same, step_of
from upweight.errors import ConfigError
from upweight.ops import logprobs
from upweight.training.rl import GroupRolloutBatch, PPOConfig, PPOTrainer


class Counted(Policy):
    """Counts the forward passes that are traced, of policies (seed 0) and references (seed 1)."""

    calls: list[int] = []  # noqa: RUF012 - shared by the copies that are traced

    def __init__(self, seed: int = 0, critic: bool = False) -> None:
        super().__init__(seed, critic)
        self.seed = seed

    def __call__(self, tokens: jax.Array) -> Any:
        Counted.calls.append(self.seed)
        return super().__call__(tokens)


@pytest.mark.parametrize(
    ("kind", "config", "expected"),
    [
        ("reinforce", {}, [0]),
        ("ppo", {}, [0]),
        ("grpo", {}, [0, 1]),
        ("grpo", {"kl_estimator": "k3"}, [0, 1]),
        ("grpo", {"beta": 0.0}, [0]),
        ("dpo", {}, [0, 1]),
        ("dpo", {"reference_free": True}, [0]),
        ("dpo", {"loss_type": "simpo"}, [0]),
        ("sft", {}, [0]),
    ],
)
def test_c05_forward_passes_of_a_step(kind: str, config: dict[str, Any], expected: list[int]) -> None:
    Counted.calls.clear()
    more = {"reference": Counted(1)} if kind in ("grpo", "dpo") else {}
    case = ALL[kind](Counted(0, critic=kind == "ppo"), **more, **config)
    case.trainer.train_step(case.batch)
    assert sorted(Counted.calls) == expected
    Counted.calls.clear()
    case.trainer.train_step(case.batch)
    assert Counted.calls == []  # nothing is traced again


@pytest.mark.parametrize("kind", ["reinforce", "ppo", "grpo"])
def test_c05_no_entropy_without_a_coefficient(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(logp: jax.Array) -> jax.Array:
        raise AssertionError("entropy was computed")

    monkeypatch.setattr(logprobs, "entropies", refuse)

    def step(coefficient: float) -> dict[str, float]:
        return step_of(ALL[kind](Policy(critic=kind == "ppo"), entropy_coeff=coefficient))[0]

    assert step(0.0)["entropy"] == 0.0
    with pytest.raises(AssertionError, match="entropy was computed"):
        step(0.1)


@pytest.mark.parametrize("kind", ALL)
def test_c15_a_repeated_shape_compiles_nothing(kind: str, compilations: Compilations) -> None:
    case = ALL[kind]()
    step_of(case)
    before = compilations.total
    for _ in range(3):
        step_of(case)
    assert compilations.total == before


def test_c15_c17_lengths_of_one_bucket_share_their_programs(compilations: Compilations) -> None:
    """The first shape is taken as it is; 9 to 16 tokens and 5 and 6 rows share a bucket."""
    case = trainers.reinforce(gamma=0.75)
    step_of(case)

    def step(rows: int, length: int) -> None:
        response = np.ones((rows, length), np.float32)
        batch = small.rollout(
            sequences=small.tokens(rows, length), response_mask=response, rewards=np.arange(rows, dtype=np.float32)
        )
        case.trainer.train_step(batch)

    step(6, 16)
    before = compilations.total
    for rows, length in ((6, 13), (5, 16), (6, 10), (5, 9)):
        step(rows, length)
    assert compilations.total == before


@pytest.mark.parametrize("kind", ALL)
def test_padding_changes_nothing(kind: str) -> None:
    """A trainer that first met another shape pads this one, in rows and length."""
    plain, expected = step_of(ALL[kind](), odd(trainers.batch_for(kind)))
    case = ALL[kind]()
    case.trainer._shapes.first = (1, 5)
    metrics, after = step_of(case, odd(case.batch))
    assert metrics == pytest.approx(plain, rel=1e-5, abs=1e-6)
    assert_same(after, expected, rtol=2e-6, atol=1e-8)


def odd(batch: Any) -> Any:
    """Five rows of the batch, or five groups, which fit no bucket."""
    if isinstance(batch, GroupRolloutBatch):
        return replace(batch, rollout=jax.tree.map(lambda x: np.concatenate([x, x, x[:2]]), batch.rollout))
    return jax.tree.map(lambda x: np.concatenate([x, x[:1]]), batch)


@pytest.mark.parametrize(("kind", "head"), [*((kind, False) for kind in ALL), ("grpo", True), ("ppo", True)])
def test_d10_any_split_gives_the_gradient_of_the_whole_batch(kind: str, head: bool) -> None:
    def case() -> trainers.Case:
        if not head:
            return ALL[kind](**({} if kind in ("dpo", "sft") else {"loss_aggregation": "seq_mean_token_mean"}))
        return ALL[kind](
            HeadPolicy(0, critic=kind == "ppo"), **({"reference": HeadPolicy(1)} if kind == "grpo" else {})
        )

    whole = step_of(case())
    for parts in (2,) if head else (3, 4):
        metrics, after = step_of(case(), num_microbatches=parts)
        assert metrics == pytest.approx(whole[0], rel=1e-5, abs=1e-6)
        assert_same(after, whole[1], rtol=1e-5)


@pytest.mark.parametrize("kind", ["reinforce", "ppo", "dpo", "sft"])
def test_d10_one_update_from_several_batches(kind: str) -> None:
    """Of a batch and of its two unequal halves, whitening included."""
    whole = step_of(ALL[kind]())
    case = ALL[kind]()
    parts = [jax.tree.map(lambda x, a=a, b=b: x[a:b], case.batch) for a, b in ((0, 1), (1, 4))]
    _, metrics = case.trainer.train_step_accumulated(parts)
    assert {name: float(x) for name, x in metrics.items()} == pytest.approx(whole[0], rel=1e-5, abs=1e-6)
    assert_same(params(case.trainer.model), whole[1], rtol=1e-5)


@pytest.mark.parametrize("kind", ALL)
def test_the_chunked_head_gives_the_same(kind: str) -> None:
    plain = step_of(ALL[kind](Policy(critic=kind == "ppo")))
    more = {"reference": HeadPolicy(1)} if kind in ("grpo", "dpo") else {}
    case = ALL[kind](HeadPolicy(critic=kind == "ppo"), **more)
    metrics, after = step_of(case)
    assert metrics == pytest.approx(plain[0], rel=1e-5, abs=1e-6)
    assert_same(after, plain[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ALL)
def test_an_update_that_is_not_finite_changes_nothing(kind: str) -> None:
    case = ALL[kind]()
    case.trainer.model.out.bias[...] = case.trainer.model.out.bias[...].at[0].set(jnp.nan)
    before, steps = params(case.trainer.model), int(case.trainer.optimizer.step[...])
    metrics, after = step_of(case)
    assert metrics["update_skipped"] == 1
    assert_same(before, after, 0, 0)
    assert int(case.trainer.optimizer.step[...]) == steps


@pytest.mark.parametrize("kind", ALL)
def test_t5_every_config_clips(kind: str) -> None:
    case = ALL[kind](max_grad_norm=1e-3)
    before = params(case.trainer.model)
    metrics, after = step_of(case)
    assert metrics["grad_norm"] > 1e-2
    moved = np.sqrt(sum(((a - b) ** 2).sum() for a, b in zip(before, after, strict=True)))
    assert moved == pytest.approx(0.1 * 1e-3, rel=1e-2)  # rate · norm


def test_c27_a_step_of_ones_own_is_clipped_as_well() -> None:
    expected, after = step_of(trainers.ppo(max_grad_norm=1e-3))
    case = trainers.ppo(max_grad_norm=1e-3)
    loss_fn = case.trainer.create_loss_fn()

    @nnx.jit
    def step(model: nnx.Module, optimizer: nnx.Optimizer, batch: Any) -> Any:
        (loss, metrics), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model, batch)
        return loss, metrics | case.trainer.update_model(model, optimizer, grads, loss)

    loss, metrics = step(case.trainer.model, case.trainer.optimizer, case.batch)
    assert float(loss) == pytest.approx(expected["total_loss"], rel=1e-5)
    assert float(metrics["grad_norm"]) == pytest.approx(expected["grad_norm"], rel=1e-4)
    assert_same(params(case.trainer.model), after, rtol=1e-5)


def test_t2_the_loss_function_is_always_the_same() -> None:
    for make in ALL.values():
        case = make()
        loss_fn = case.trainer.create_loss_fn()
        assert loss_fn is case.trainer.create_loss_fn()
        plain = float(nnx.jit(loss_fn)(case.trainer.model, case.batch)[0])
        assert float(case.trainer.eval_step(case.batch)[0]) == pytest.approx(plain, rel=1e-5)
    assert float(case.trainer.compute_loss(case.batch)[0]) == pytest.approx(plain, rel=1e-5)


def test_gradients_flow_to_the_numbers_of_a_batch() -> None:
    case = trainers.reinforce(normalize_returns=False, entropy_coeff=0.0)
    loss_fn, model = case.trainer.create_loss_fn(), case.trainer.model

    def of(returns: jax.Array) -> jax.Array:
        return loss_fn(model, small.rollout(returns=returns))[0]

    lp = small.log_probs_of(small.logits_of(small.arrays(model), small.tokens()), small.tokens())
    np.testing.assert_allclose(jax.grad(of)(jnp.asarray(OTHER)), -lp * small.MASK / 13, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("kind", ALL)
def test_t6_a_resumed_trainer_goes_on_bit_for_bit(kind: str) -> None:
    def case() -> trainers.Case:
        made = ALL[kind](Policy(critic=kind == "ppo"))
        made.trainer.optimizer = nnx.Optimizer(made.trainer.model, optax.adam(0.01), wrt=nnx.Param)
        return made

    first = case()
    step_of(first)
    state = first.trainer.state_dict()
    assert state["step"] == 1
    expected = step_of(first)
    second = case()
    second.trainer.load_state_dict(state)
    metrics, after = step_of(second)
    assert metrics == expected[0]
    assert_same(after, expected[1], 0, 0)


def test_t6_a_state_of_another_config_or_model_is_refused() -> None:
    state = trainers.reinforce().trainer.state_dict()
    with pytest.raises(ConfigError, match=r"gamma is 0.5 here and 0.99 in the state"):
        trainers.reinforce(gamma=0.5).trainer.load_state_dict(state)
    with pytest.raises(Exception, match=r"critic.* is missing"):
        trainers.reinforce(Policy(critic=True)).trainer.load_state_dict(state)


def test_t4_ppo_updates_in_minibatches_and_epochs() -> None:
    """Two passes over two minibatches are four single steps on rows of the once-whitened rollout."""
    case, twin = trainers.ppo(), trainers.ppo(whiten_advantages=False)
    kept = OTHER[small.MASK > 0]
    white = small.MASK * (OTHER - kept.mean()) / np.sqrt(kept.var() + 1e-8)
    batch = replace(twin.batch, advantages=jnp.asarray(white, jnp.float32))
    losses = []
    for _ in range(2):
        for rows in (slice(0, 3), slice(3, 4)):
            part = jax.tree.map(lambda x, rows=rows: x[rows], batch)
            losses.append(float(twin.trainer.train_step(part)[0]))
    loss, metrics = case.trainer.update(case.batch, epochs=2, minibatch_size=3)
    assert float(loss) == pytest.approx(np.mean(losses), rel=1e-4)
    assert metrics["update_skipped"] == 0
    assert_same(params(case.trainer.model), params(twin.trainer.model), rtol=1e-4, atol=1e-6)
    with pytest.raises(ValueError, match="epochs is 0"):
        case.trainer.update(case.batch, epochs=0)


def test_target_kl_stops_updates_and_says_so() -> None:
    case = trainers.ppo(target_kl=1e-4)
    before = params(case.trainer.model)
    metrics, after = step_of(case)
    assert metrics["approx_kl"] > 1e-4
    assert metrics["update_skipped"] == 1
    assert_same(before, after, 0, 0)
    assert step_of(trainers.ppo(target_kl=10.0))[0]["update_skipped"] == 0


class Noisy(Policy):
    """With dropout: a random stream that counts how often it was asked."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.drop = nnx.Dropout(0.5, rngs=nnx.Rngs(seed))

    def states(self, tokens: jax.Array) -> jax.Array:
        return self.drop(super().states(tokens))


def test_random_streams_go_on_from_step_to_step() -> None:
    case = trainers.reinforce(Noisy())
    counts = [int(case.trainer.model.drop.rngs.count[...])]
    losses = []
    for _ in range(2):
        losses.append(step_of(case)[0]["total_loss"])
        counts.append(int(case.trainer.model.drop.rngs.count[...]))
    assert counts == [0, 1, 2]
    case.trainer.compute_loss(case.batch)
    assert int(case.trainer.model.drop.rngs.count[...]) == 3


def test_parameters_are_never_donated() -> None:
    """A clone shares the buffers of the model, and a handle to one stays readable."""
    model = Policy()
    reference = nnx.clone(model)
    handle = model.out.kernel[...]
    case = trainers.grpo(model, reference)
    start = params(reference)
    for _ in range(3):
        step_of(case)
    assert_same(params(reference), start, 0, 0)
    assert np.isfinite(np.asarray(handle)).all()


def test_c22_an_incomplete_group_is_refused() -> None:
    case = trainers.grpo()
    cut = jax.tree.map(lambda x: x[:3], case.batch)
    assert cut.num_groups == 1
    with pytest.raises(ValueError, match="3 is not divisible into groups of 2"):
        case.trainer.train_step(cut)
    with pytest.raises(ValueError, match="not divisible"):
        case.trainer.train_step(jax.tree.map(lambda x: x[:1], case.batch))


def test_d01_memory_stays_flat() -> None:
    case = trainers.ppo()
    process = psutil.Process()
    sizes = []
    for i in range(360):
        case.trainer.train_step(case.batch)
        if i >= 60 and i % 60 == 0:
            sizes.append(process.memory_info().rss)
    assert min(sizes[-2:]) - sizes[0] < 8 << 20  # at the reference's rate it would be 400 MB


def test_separate_critic_parameters_learn_through_the_value_loss() -> None:
    model = Policy(critic=True)
    trainer = PPOTrainer(model, small.optimizer(model), PPOConfig(entropy_coeff=0.0))
    before = np.asarray(model.critic.kernel[...]).copy()
    step_of(trainers.Case(trainer, trainers.ppo().batch))
    assert np.abs(np.asarray(model.critic.kernel[...]) - before).max() > 1e-3


SHARDED = """
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from tests.training.rl import small, trainers
assert jax.device_count() == 4
one = trainers.step_of(trainers.grpo())
case = trainers.grpo()
rows = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), P("data"))
batch = jax.tree.map(lambda x: jax.device_put(x, rows), case.batch)
metrics, after = trainers.step_of(case, batch)
for name, value in one[0].items():
    assert abs(metrics[name] - value) < 1e-5, name
trainers.assert_same(after, one[1], rtol=1e-5)
print("equal")
"""


def test_d02_sharded_batches_give_the_result_of_one_device() -> None:
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", SHARDED], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == "equal", done.stderr[-2000:]
