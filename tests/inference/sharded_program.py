"""Run with two CPU devices: greedy answers of a model whose matrices lie on both, and of two replicas with one each, beside those
of one model on a single device."""

from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tests.models.golden import load_golden, rows
from upweight.inference import InferenceScheduler
from upweight.online.load_check import check_loaded
from upweight.weights.loading import LoadedModel

AXES = {"qkv": (None, "x"), "gate_up": (None, "x"), "o": ("x", None), "down": ("x", None)}


def spread(model: LoadedModel) -> LoadedModel:
    mesh = Mesh(np.array(jax.devices()), ("x",))

    def put(path: tuple, array: jax.Array) -> jax.Array:
        return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*AXES.get(path[-1].key, ()))))

    params = jax.tree_util.tree_map_with_path(put, model.params)
    return LoadedModel(**{**vars(model), "params": params})


def answers(model: LoadedModel, prompts: list[list[int]]) -> list:
    with InferenceScheduler(model, model.tokenizer, max_batch_size=4) as scheduler:
        check_loaded(scheduler.engine)
        found = scheduler.run_batch(prompts, max_tokens=12, temperature=0, ignore_eos=True, return_logprobs=True)
        scheduler.set_weights(model.params, 1)
        again = scheduler.run_batch(prompts, max_tokens=12, temperature=0, ignore_eos=True, return_logprobs=True)
    assert found == again
    return found


def replica(device: jax.Device, model: LoadedModel, prompts: list[list[int]]) -> list:
    """What one of two replicas answers under weights that lie on the first device."""
    with InferenceScheduler(model, model.tokenizer, max_batch_size=4, device=device) as scheduler:
        scheduler.set_weights(model.params, 1)
        outputs = scheduler.run_batch(prompts, max_tokens=12, temperature=0, ignore_eos=True, return_details=True)
        (array,) = {leaf.sharding for leaf in jax.tree.leaves(scheduler.engine.runner.params)}
    assert array.device_set == {device}
    assert {version for output in outputs for version in output.token_versions} == {1}
    return [(output.token_ids, output.logprobs) for output in outputs]


assert jax.device_count() == 2
model = load_golden("qwen3")
sharded = spread(model)
assert len(sharded.params["layers"][0]["qkv"].sharding.device_set) == 2
single = answers(model, rows("qwen3"))
with ThreadPoolExecutor(2) as pool:
    replicas = [pool.submit(replica, device, model, rows("qwen3")) for device in jax.devices()]
    assert [one.result(60) for one in replicas] == [single, single]
for (ids, logprobs), (other_ids, other_logprobs) in zip(single, answers(sharded, rows("qwen3")), strict=True):
    assert ids == other_ids
    np.testing.assert_allclose(logprobs, other_logprobs, atol=1e-5)
print("equal")
