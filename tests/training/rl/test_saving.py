"""States on disk: exact, whole or absent, never replaced."""

import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from tests.training.rl import trainers
from tests.training.rl.small import Policy, params
from tests.training.rl.trainers import ALL, assert_same
from upweight.errors import ConfigError, TrainingError
from upweight.training import load_state, newest_state, prune_states, save_state


class Noisy(Policy):
    """With dropout, whose stream is a part of the state."""

    def __init__(self, seed: int = 0, critic: bool = False) -> None:
        super().__init__(seed, critic)
        self.drop = nnx.Dropout(0.3, rngs=nnx.Rngs(seed))

    def states(self, tokens: jax.Array) -> jax.Array:
        return self.drop(super().states(tokens))


class ActorCritic(nnx.Module):
    """A policy and a critic that share nothing."""

    def __init__(self) -> None:
        self.policy, self.critic = Noisy(0), Policy(1, critic=True)

    def __call__(self, tokens: jax.Array) -> Any:
        return self.policy(tokens), self.critic(tokens)[1]


def case(kind: str) -> trainers.Case:
    made = ALL[kind](ActorCritic() if kind == "ppo" else Noisy())
    made.trainer.optimizer = nnx.Optimizer(made.trainer.model, optax.adam(0.01), wrt=nnx.Param)
    return made


def step(each: trainers.Case, order: nnx.Rngs) -> None:
    """On the batch's rows in an order (of whole pairs, so of whole groups) that the loop draws."""
    rows = np.asarray(jax.random.permutation(order.data(), 2))
    places = np.stack([2 * rows, 2 * rows + 1], axis=1).reshape(-1)
    each.trainer.train_step(jax.tree.map(lambda x: np.asarray(x)[places], each.batch))


@pytest.mark.parametrize("kind", ALL)
def test_four_steps_are_two_and_two_after_a_resume(kind: str, tmp_path: Path) -> None:
    whole, order = case(kind), nnx.Rngs(data=5)
    for i in range(4):
        step(whole, order)
        if i == 1:
            path = save_state(tmp_path, whole.trainer, cursor={"epoch": 1, "read": [8, 8]}, rngs=order)
    assert path == tmp_path / "step-000002" == newest_state(tmp_path)

    fresh, again = case(kind), nnx.Rngs(data=0)
    assert load_state(path, fresh.trainer, rngs=again) == {"epoch": 1, "read": [8, 8]}
    for _ in range(2):
        step(fresh, again)
    if kind == "ppo":
        assert (
            np.abs(
                fresh.trainer.model.critic.critic.kernel[...] - case(kind).trainer.model.critic.critic.kernel[...]
            ).max()
            > 0
        )
    for one, other in ((whole.trainer.model, fresh.trainer.model), (whole.trainer.optimizer, fresh.trainer.optimizer)):
        for a, b in zip(jax.tree.leaves(nnx.state(one)), jax.tree.leaves(nnx.state(other)), strict=True):
            np.testing.assert_array_equal(_numbers(a), _numbers(b))


def _numbers(x: Any) -> np.ndarray:
    return np.asarray(jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x)


def test_a_step_saved_twice_replaces_nothing(tmp_path: Path) -> None:
    """As after a skipped update, which leaves the optimizer's count where it was."""
    trainer = trainers.reinforce().trainer
    paths = [save_state(tmp_path, trainer, cursor={"read": i}) for i in range(11)]
    assert [path.name for path in paths[:3]] == ["step-000000", "step-000000.1", "step-000000.2"]
    assert newest_state(tmp_path) == paths[10]
    assert load_state(paths[10], trainer) == {"read": 10}
    assert prune_states(tmp_path, keep=2) == sorted(paths[:9])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000000.10", "step-000000.9"]


def test_a_save_cut_short_is_never_picked(tmp_path: Path) -> None:
    assert newest_state(tmp_path / "nowhere") is None
    trainer = trainers.reinforce().trainer
    whole = save_state(tmp_path, trainer)
    partial = tmp_path / "step-000009"
    shutil.copytree(whole, partial)
    (partial / "_METADATA").unlink()
    shutil.copytree(whole, tmp_path / "step-000008.orbax-checkpoint-tmp-3")
    assert newest_state(tmp_path) == whole
    with pytest.raises(TrainingError, match="is no complete state; use newest_state"):
        load_state(partial, trainer)
    prune_states(tmp_path, keep=3)
    assert list(tmp_path.iterdir()) == [whole]


def test_what_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    trainer = trainers.reinforce(gamma=0.5).trainer
    path = save_state(tmp_path, trainer, rngs=nnx.Rngs(1))
    assert load_state(path, trainer) is None  # the streams stay unread
    other = trainers.reinforce(Policy(1)).trainer
    before = params(other.model)
    with pytest.raises(ConfigError, match=r"gamma is 0.99 here and 0.5 in the state"):
        load_state(path, other)
    critic = trainers.reinforce(Policy(critic=True)).trainer
    with pytest.raises(TrainingError, match=r"critic.* is missing"):
        load_state(path, critic)
    with pytest.raises(TrainingError, match="was saved without rngs"):
        load_state(save_state(tmp_path, trainer), trainer, rngs=nnx.Rngs(1))
    with pytest.raises(ConfigError, match="cursor can't be written as JSON"):
        save_state(tmp_path, trainer, cursor={"read": np.arange(2)})
    assert_same(params(other.model), before, 0, 0)


def test_a_config_with_a_range_comes_back(tmp_path: Path) -> None:
    trainer = trainers.grpo(is_mask=(0.5, 2.0)).trainer
    assert load_state(save_state(tmp_path, trainer), trainer) is None


SAVING = """
import sys
from tests.training.rl import trainers
from upweight.training import save_state
case = trainers.sft()
while True:
    case.trainer.train_step(case.batch)
    print(save_state(sys.argv[1], case.trainer, cursor={"read": 4}), flush=True)
"""


@pytest.mark.soak
@pytest.mark.parametrize("delay_s", [0.0, 0.02, 0.05, 0.09])
def test_a_kill_while_saving_leaves_the_newest_whole(delay_s: float, tmp_path: Path) -> None:
    """Killed so long after a state was said to be on disk, which is about when the next one is being written."""
    with subprocess.Popen([sys.executable, "-c", SAVING, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = [process.stdout.readline().strip() for _ in range(3)]
        time.sleep(delay_s)
        process.kill()
        said += process.stdout.read().split()
    newest = newest_state(tmp_path)
    assert newest is not None
    assert newest >= Path(said[-1])
    trainer = trainers.sft().trainer
    assert load_state(newest, trainer) == {"read": 4}
    assert int(trainer.optimizer.step[...]) == int(newest.name.removeprefix("step-"))
    prune_states(tmp_path, keep=1)
    assert list(tmp_path.iterdir()) == [newest]


def test_a_band_given_as_a_list_is_that_of_the_saved_state(tmp_path: Path) -> None:
    made = trainers.grpo(Policy(), is_mask=[0.5, 2.0])
    assert made.trainer.config.is_mask == (0.5, 2.0)
    path = save_state(tmp_path, made.trainer)
    load_state(path, trainers.grpo(Policy(), is_mask=(0.5, 2.0)).trainer)
    with pytest.raises(ConfigError, match="is_mask"):
        load_state(path, trainers.grpo(Policy(), is_mask=(0.5, 3.0)).trainer)
