"""Every family through the engine (chunked prefill, decode, preemption) and through the trainer (packed rows, LoRA)."""

import json

import jax
import numpy as np
import pytest

from tests.models.golden import DATA, WHOLE, load_golden, outputs, rows, tolerances
from tests.training.batch_makers import make_batch
from upweight.inference import InferenceScheduler
from upweight.inference.engine import Engine
from upweight.inference.gather import answers_to
from upweight.inference.programs import token_bytes
from upweight.inference.types import GenerationOutput, SamplingParams
from upweight.models.decoder import Decoder
from upweight.online.load_check import check_loaded
from upweight.ops.samples import TrainBatch
from upweight.training.policy_trainer import PolicyTrainer
from upweight.training.settings import PRESETS, LoraSettings, PolicySettings
from upweight.weights.loading import LoadedModel

GREEDY = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
ROWS = 2


def engine_of(model: LoadedModel, params: dict | None = None) -> Engine:
    """Pages for 64 tokens: two long rows do not fit. All tests use this size, so that they share their programs."""
    store = 64 * token_bytes(model.config, model.params)
    engine = Engine(model.config, params or model.params, model.tokenizer, max_rows=ROWS, store_bytes=store)
    engine.scheduler.prefill_budget = 7  # the longest row comes in three pieces
    return engine.start()


@pytest.mark.parametrize("name", WHOLE)
def test_greedy_answers_in_a_batch_preempted_and_alone(name: str) -> None:
    model, golden, prompts = load_golden(name), outputs(name), rows(name)
    prompts.append(prompts[1][:3])
    atol = tolerances(name)["logprobs_atol"]
    engine = engine_of(model)
    together = answers_to(engine, prompts, GREEDY)
    assert engine.stats()["preemptions"] > 0
    alone = [answers_to(engine, [prompt], GREEDY)[0] for prompt in prompts]
    engine.stop()
    for found in (together[0], alone[0]):
        assert found.token_ids[:12] == golden["greedy_ids"].tolist()
        np.testing.assert_allclose(found.logprobs[:12], golden["greedy_logprobs"], atol=atol, rtol=0)
    for one, other in zip(together, alone, strict=True):
        assert one.token_ids == other.token_ids
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=atol, rtol=0)


def batch_of(prompts: list[list[int]], outputs: list[GenerationOutput], version: int) -> TrainBatch:
    """What the engine drew, as the trainer gets it; both samples of a prompt share its tokens in the packed row."""
    samples = [(prompt, output.token_ids) for prompt, output in zip(prompts, outputs, strict=True)]
    batch = make_batch(samples, np.linspace(-1, 1, len(samples)))
    batch.logprobs[batch.mask > 0] = np.concatenate([output.logprobs for output in outputs])
    batch.versions[batch.mask > 0] = version
    return batch


@pytest.mark.parametrize("name", WHOLE)
def test_the_packed_rows_of_the_trainer(name: str) -> None:
    """Equal advantages of 1 and a token mean: the gradient is that of the mean −log p, whose norm is known."""
    golden, grads = outputs(name), json.loads((DATA / name / "golden_grads.json").read_text())
    samples = [(row[:1], row[1:]) for row in rows(name)]
    batch = make_batch(samples, [1.0, 1.0, 1.0])
    batch.logprobs[batch.mask > 0] = np.concatenate(
        [golden["logprobs"][b, : len(answer)] for b, (_, answer) in enumerate(samples)]
    )
    model = load_golden(name)
    settings = PolicySettings(algorithm="bnpo", preset=PRESETS["bnpo"], correction="none")
    report = PolicyTrainer(model.config, model.params, settings).train(batch)
    assert report.metrics["mismatch_max"] < tolerances(name)["logprobs_atol"]
    assert report.metrics["on_policy_tokens"] == 30
    assert report.metrics["grad_norm"] == pytest.approx(
        grads["global_grad_norm"], rel=tolerances(name)["grad_norm_rtol"]
    )


@pytest.mark.parametrize("name", ["qwen2", "gemma3"])
def test_a_trained_adapter_in_engine_and_trainer(name: str) -> None:
    """The engine samples with the adapter merged in, the trainer scores with it apart."""
    model, atol = load_golden(name), tolerances(name)["logprobs_atol"]
    prompts = [prompt for prompt in rows(name)[:2] for _ in range(2)]
    settings = PolicySettings(lora=LoraSettings(rank=4, alpha=8.0), learning_rate=0.02)
    trainer = PolicyTrainer(model.config, model.params, settings)
    engine = engine_of(model, trainer.policy_params())
    drawn = [SamplingParams(max_tokens=9, ignore_eos=True, seed=seed) for seed in range(4)]
    first = trainer.train(batch_of(prompts, answers_to(engine, prompts, drawn), 0))
    engine.set_weights(trainer.policy_params(), 1)
    before = trainer.policy_params()
    second = trainer.train(batch_of(prompts, answers_to(engine, prompts, drawn), 1))
    engine.stop()
    moved = np.abs(np.asarray(before["layers"][0]["qkv"]) - np.asarray(model.params["layers"][0]["qkv"])).max()
    assert moved > 0.01
    assert first.metrics["mismatch_max"] < atol
    assert second.metrics["mismatch_max"] < atol


@pytest.mark.parametrize("name", ["gemma2"])
def test_scores_in_float32_and_bfloat16(name: str) -> None:
    model, golden, sequences = load_golden(name), outputs(name)["logprobs"], rows(name)
    for dtype, mean, largest in (("float32", 2e-5, tolerances(name)["logprobs_atol"]), ("bfloat16", 0.06, 0.6)):
        with InferenceScheduler(model, model.tokenizer, max_batch_size=ROWS, dtype=dtype) as scheduler:
            found = scheduler.score(sequences)
            check_loaded(scheduler.engine)
        gaps = np.concatenate([np.abs(golden[b, : len(row) - 1] - found[b]) for b, row in enumerate(sequences)])
        assert gaps.mean() < mean, dtype
        assert gaps.max() < largest, dtype


def test_many_tokens_are_computed_again_in_the_backward_pass_and_change_no_gradient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = load_golden("llama-gqa-tied")
    tokens = jax.numpy.arange(24).reshape(2, 12) % 29

    def loss(params):
        return Decoder(model.config, params).hidden_states(tokens).sum()

    few = jax.jit(jax.grad(loss))(model.params)
    assert "remat" not in str(jax.make_jaxpr(jax.grad(loss))(model.params))
    monkeypatch.setattr("upweight.models.decoder.REMAT_TOKENS", 8)
    jax.clear_caches()
    assert "remat" in str(jax.make_jaxpr(jax.grad(loss))(model.params))
    for one, other in zip(jax.tree.leaves(few), jax.tree.leaves(jax.jit(jax.grad(loss))(model.params)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
