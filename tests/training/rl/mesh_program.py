"""Trainers on meshes of devices, as programs that tests start: simulated devices and several processes need a fresh start.

`python -m tests.training.rl.mesh_program KIND…` compares one process with 8 devices to one device; `JOIN` is the program of one of
two processes with 2 devices each.
"""

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

from tests.training.rl import small, test_sharing, trainers
from tests.training.rl.conftest import Compilations
from tests.training.rl.small import HeadPolicy
from upweight.models.config import DecoderConfig, RopeConfig
from upweight.models.decoder import random_params
from upweight.training import Placement, SFTTrainer, load_state, newest_state, save_state
from upweight.training.rl.devices import on_host

B1 = 0.9
CONFIG = DecoderConfig(
    model_type="llama",
    vocab_size=32,
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    max_context=64,
    norm_eps=1e-6,
    rope=RopeConfig(theta=1000.0),
    tied=False,
)


def made(kind: str) -> trainers.Case:
    """A trainer on a decoder with Adam, whose rows, prompts and answers are those of the tests of shared prompts; `small` has
    a model that compiles quickly."""
    if kind == "small":
        trainer, batch = SFTTrainer(model := HeadPolicy(), small.optimizer(model)), small.answers()
    else:
        trainer, batch = test_sharing.made(kind, CONFIG, random_params(CONFIG, jax.random.key(0), scale=0.4))
    trainer.optimizer = nnx.Optimizer(trainer.model, optax.adam(0.01, b1=B1, eps=1e-3), wrt=nnx.Param)
    return trainers.Case(trainer, batch)


def placements() -> Iterator[Placement]:
    devices = np.array(jax.devices())
    yield Placement(Mesh(devices, ("data",)))
    yield Placement(Mesh(devices, ("data",)), parameters="data")
    yield Placement(jax.make_mesh((2, len(devices) // 2), ("data", "model")), parameters="model")


class Numbers(NamedTuple):
    metrics: list[dict[str, float]]  # of each step
    gradients: list[np.ndarray]  # of the first step, array by array
    params: list[np.ndarray]  # after all of them


def numbers(case: trainers.Case, steps: int = 2) -> Numbers:
    """Adam's first moment, which starts at 0, is (1 − b1)·gradient after a step: it hides no scale, as a step of Adam does."""
    metrics, gradients = [], []
    for _ in range(steps):
        metrics.append(case.trainer.train_step(case.batch)[1])
        gradients = gradients or [
            on_host(x) / (1 - B1) for x in jax.tree.leaves(case.trainer.optimizer.opt_state[0].mu)
        ]
    leaves = jax.tree.leaves(nnx.state(case.trainer.model, nnx.Param))
    return Numbers(
        [{name: float(x) for name, x in each.items()} for each in metrics], gradients, [on_host(x) for x in leaves]
    )


def assert_near(got: Numbers, expected: Numbers) -> None:
    for one, other in zip(got.metrics, expected.metrics, strict=True):
        assert one.keys() == other.keys()
        for name, value in other.items():
            assert abs(one[name] - value) <= 1e-5 * max(1.0, abs(value)), (name, one[name], value)
    for one, other in zip(got.gradients, expected.gradients, strict=True):
        size = np.linalg.norm(other)
        assert size > 0
        assert np.linalg.norm(one - other) <= 2e-5 * size, (other.shape, np.linalg.norm(one - other) / size)
    trainers.assert_same(got.params, expected.params, rtol=1e-4, atol=1e-5)


def on_devices(kinds: list[str]) -> None:
    """Loss, metrics, each array of the gradient and of the parameters as on one device; each device holds its part of a split array."""
    assert jax.device_count() == 8
    compilations = Compilations()
    jax.monitoring.register_event_duration_secs_listener(compilations)
    for kind in kinds:
        expected = numbers(made(kind))
        for placement in placements():
            case = made(kind)
            case.trainer.place(placement)
            assert_near(numbers(case), expected)
            before = compilations.total
            case.trainer.train_step(case.batch)
            assert compilations.total == before
            parts = 1 if placement.parameters is None else placement.mesh.shape[placement.parameters]
            for array in (case.trainer.model.embed[...], case.trainer.optimizer.opt_state[0].mu.embed[...]):
                assert array.addressable_shards[0].data.size * parts == array.size
    assert_resumed(case, lambda: made(kinds[-1]))


def assert_resumed(case: trainers.Case, fresh: Any) -> None:
    """A split state comes back to the devices that its parts lie on."""
    with tempfile.TemporaryDirectory() as folder:
        path = save_state(folder, case.trainer)
        other = fresh()
        other.trainer.place(case.trainer._placement)
        load_state(path, other.trainer)
    for one, two in zip(*(jax.tree.leaves(nnx.state(c.trainer.model)) for c in (case, other)), strict=True):
        assert two.sharding.is_equivalent_to(one.sharding, one.ndim)
        np.testing.assert_array_equal(one, two)
    assert numbers(case, 1).metrics == numbers(other, 1).metrics


# Joining comes before anything else that uses a device, as importing the tests does.
JOIN = """
import sys, jax
number, port, folder, kind = sys.argv[1:]
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=int(number))
from tests.training.rl import mesh_program
mesh_program.in_processes(folder, kind)
"""


def in_processes(folder: str, kind: str) -> None:
    """Writes what comes of rows and parameters split over both processes; their state goes to disk and comes back."""
    assert jax.device_count() == 2 * jax.local_device_count()
    placement = Placement(Mesh(np.array(jax.devices()), ("data",)), parameters="data")
    case, again = made(kind), made(kind)
    for each in (case, again):
        each.trainer.place(placement)
    found = numbers(case)
    answer = Path(folder) / f"answer-{jax.process_index()}.json"
    arrays = [[x.tolist() for x in several] for several in (found.gradients, found.params)]
    answer.write_text(json.dumps([found.metrics, *arrays]))
    save_state(folder, case.trainer, cursor={"read": 16})
    path = newest_state(folder)
    assert path is not None
    assert load_state(path, again.trainer) == {"read": 16}
    assert numbers(again, 1).metrics == numbers(case, 1).metrics


if __name__ == "__main__":
    on_devices(sys.argv[1:])
    print("equal")
