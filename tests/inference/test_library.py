"""The calls of library code: tasks, text in and text out, streams, asyncio."""

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from upweight.errors import ConfigError, EngineError, RequestError
from upweight.inference import FinishReason, GenerationOutput, InferenceEngine, InferenceScheduler
from upweight.weights.loading import LoadedModel, load_model

GREEDY: dict[str, Any] = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
PROMPTS = ["Hello", "The capital of France is", "1 2 3"]


@pytest.fixture(scope="module")
def model(tiny_model_folder: Path) -> LoadedModel:
    return load_model(str(tiny_model_folder))


@pytest.fixture(scope="module")
def engine(model: LoadedModel) -> Iterator[InferenceEngine]:
    with InferenceEngine(model, model.tokenizer, max_batch_size=2) as running:
        yield running


@pytest.fixture(scope="module")
def answers(engine: InferenceEngine) -> list[str]:
    """Each prompt alone, on a quiet engine."""
    return [engine.generate(prompt, **GREEDY) for prompt in PROMPTS]


def test_one_and_several_prompts_whole_and_streamed(
    model: LoadedModel, engine: InferenceEngine, answers: list[str]
) -> None:
    assert all(isinstance(answer, str) and answer for answer in answers)
    assert engine.generate(PROMPTS, **GREEDY) == answers
    ids = [model.tokenizer.encode(prompt) for prompt in PROMPTS]
    assert engine.generate(ids[1], **GREEDY) == answers[1]
    assert engine.generate(np.array(ids[1]), **GREEDY) == answers[1]
    assert engine.generate(list(np.array(ids[1])), **GREEDY) == answers[1]
    assert engine.generate(ids, **GREEDY) == answers
    pieces = list(engine.generate(PROMPTS[0], stream=True, **GREEDY))
    assert len(pieces) > 1
    assert "".join(pieces) == answers[0]
    joined = ["", "", ""]
    for index, piece in engine.generate(PROMPTS, stream=True, **GREEDY):
        joined[index] += piece
    assert joined == answers
    assert engine.generate([], **GREEDY) == []
    whole = answers[0]
    assert engine.generate(PROMPTS[0], stop=whole[3:6], **GREEDY) == whole[: whole.index(whole[3:6])]


def test_asyncio(engine: InferenceEngine, answers: list[str]) -> None:
    async def one(prompt: str) -> str:
        return "".join([piece async for piece in engine.generate_async(prompt, **GREEDY)])

    async def all_at_once() -> list[str]:
        return await asyncio.gather(*map(one, PROMPTS))

    before = threading.active_count()
    assert asyncio.run(all_at_once()) == answers
    assert threading.active_count() == before


def wait_until_idle(engine: InferenceEngine) -> dict[str, Any]:
    deadline = time.monotonic() + 30
    while (stats := engine.get_stats())["active_tasks"] + stats["waiting_queue"]:
        assert time.monotonic() < deadline, stats
        time.sleep(0.01)
    return stats


def test_leaving_a_stream_frees_its_rows(engine: InferenceEngine) -> None:
    long = {**GREEDY, "max_tokens": 400}

    async def first_piece() -> str:
        stream = engine.generate_async(PROMPTS[0], **long)
        piece = await anext(stream)
        await stream.aclose()  # type: ignore[attr-defined]
        return piece

    before = wait_until_idle(engine)["total_tokens"]
    assert asyncio.run(first_piece())
    stream = engine.generate(PROMPTS, stream=True, **long)
    index, piece = next(stream)
    assert (index, bool(piece)) in [(0, True), (1, True)]
    stream.close()
    assert wait_until_idle(engine)["total_tokens"] - before < 100


def test_what_cannot_be_answered_raises(model: LoadedModel, engine: InferenceEngine) -> None:
    with pytest.raises(RequestError, match=r"prompt 1 was not answered \(rejected\): the prompt has 600 tokens"):
        engine.generate([[5], [5] * 600], **GREEDY)
    with pytest.raises(RequestError, match="temperature is -1"):
        next(engine.generate("a", stream=True, temperature=-1))
    with pytest.raises(RequestError, match="prompt 0 is empty"):
        engine.generate("")
    with pytest.raises(ValueError, match="top_p is 'x'; it must be a number"):
        engine.generate("a", top_p="x")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="backend = 'paged' is not offered"):
        InferenceEngine(model, model.tokenizer, backend="paged")
    ended = InferenceEngine(model, model.tokenizer)
    stream = ended.generate("a", stream=True, max_tokens=400, ignore_eos=True)
    next(stream)
    ended.shutdown()
    with pytest.raises(EngineError, match=r"was not answered \(aborted\)"):
        list(stream)


def test_tasks_have_ids_of_their_own_for_ever(model: LoadedModel, engine: InferenceEngine, answers: list[str]) -> None:
    scheduler = engine.scheduler
    done: dict[str, GenerationOutput] = {}
    ended = threading.Semaphore(0)

    def keep(name: str) -> Any:
        def store(output: GenerationOutput) -> None:
            done[name] = output
            ended.release()

        return store

    pieces: list[str] = []
    ids = [scheduler.add_task(PROMPTS[0], 8, 0.0, stream_callback=pieces.append, on_done=keep("a"), ignore_eos=True)]
    ids.append(scheduler.add_task(PROMPTS[0], 500, on_done=keep("b"), ignore_eos=True))
    scheduler.remove_task(ids[1])
    scheduler.remove_task(10**9)
    assert ended.acquire(timeout=60)
    assert ended.acquire(timeout=60)
    assert "".join(pieces) == done["a"].text == answers[0]
    assert done["b"].finish_reason is FinishReason.ABORTED
    scheduler.remove_task(ids[0])  # finished: nothing happens
    with InferenceScheduler(model, model.tokenizer) as other:
        ids += [other.add_task([5], 1) for _ in range(3)]
    ids.append(scheduler.add_task([5], 1))
    assert len(set(ids)) == len(ids)


def test_more_prompts_than_the_queue_takes(model: LoadedModel) -> None:
    with InferenceScheduler(model, model.tokenizer, max_batch_size=2, max_queue=3) as small:
        answers = small.run_batch([[5 + i] for i in range(10)], max_tokens=1, ignore_eos=True)
        assert [len(answer) for answer in answers] == [1] * 10


def test_a_small_store_gives_the_answers_of_a_large_one(model: LoadedModel, engine: InferenceEngine) -> None:
    prompts, options = [[5 + i, 20, 30] for i in range(4)], {"max_tokens": 40, "seed": [1, 2, 3, 4], "ignore_eos": True}
    expected = engine.scheduler.run_batch(prompts, **options)
    with InferenceScheduler(model, model.tokenizer, max_batch_size=2, store_bytes=1) as small:
        assert small.run_batch(prompts, **options) == expected
        assert small.get_stats()["preemptions"] > 0
        never = small.run_batch([[5] * 100, [5]], max_tokens=1, return_details=True, ignore_eos=True)
    assert [output.finish_reason for output in never] == [FinishReason.REJECTED, FinishReason.LENGTH]


def test_arrays_and_values_per_prompt(model: LoadedModel, engine: InferenceEngine) -> None:
    scheduler = engine.scheduler
    rows = np.array([[5, 6, 7], [8, 9, 10]])
    answers = scheduler.run_batch(
        rows, max_tokens=np.array([2, 4]), temperature=[0, None], seed=[1, 2], ignore_eos=[True, True], min_tokens=0
    )
    assert [len(answer) for answer in answers] == [2, 4]
    with pytest.raises(ValueError, match=r"max_tokens is 1\.5; it must be a whole number"):
        scheduler.run_batch(rows, max_tokens=1.5)
    with pytest.raises(RequestError, match="prompt 0 is empty"):
        scheduler.run_batch([[]])
    with pytest.raises(ValueError, match="prompt 0 is empty"):
        scheduler.run_batch([[]])


def test_the_context_is_that_of_the_model(model: LoadedModel, caplog: pytest.LogCaptureFixture) -> None:
    short = InferenceScheduler(model, model.tokenizer, max_seq_len=16)
    assert short.engine.max_context == 16
    assert InferenceScheduler(model, model.tokenizer).engine.max_context == 512
    assert InferenceScheduler(model, model.tokenizer, max_seq_len=4096).engine.max_context == 512
    assert "max_seq_len is 4096, but the model's positions end at 512" in caplog.text


def test_scores_are_those_of_a_full_forward_pass(model: LoadedModel, engine: InferenceEngine) -> None:
    sequences = [[5, 6, 7, 100, 200], list(range(20, 45)), [9]]
    scheduler = engine.scheduler
    found = scheduler.score(sequences, temperature=[1.0, 0.5, 1.0])
    assert [len(row) for row in found] == [4, 24, 0]
    module = model.module()
    for ids, row, temperature in zip(sequences, found, (1.0, 0.5, 1.0), strict=True):
        logits = np.asarray(module(jnp.asarray([ids + [0] * (32 - len(ids))])), np.float64)[0] / temperature
        logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        expected = [logp[t - 1, ids[t]] for t in range(1, len(ids))]
        np.testing.assert_allclose(row, expected, atol=1e-5)
    drawn = scheduler.run_batch([[5, 6]], max_tokens=6, temperature=0.7, top_k=0, return_details=True, ignore_eos=True)
    ids = [5, 6, *drawn[0].token_ids]
    np.testing.assert_allclose(scheduler.score([ids], 0.7)[0][1:], drawn[0].logprobs, atol=1e-5)
    np.testing.assert_allclose(scheduler.score([ids])[0][1:], drawn[0].raw_logprobs, atol=1e-5)
    with pytest.raises(RequestError, match="sequence 0 was not scored: the prompt has 600 tokens"):
        scheduler.score([[5] * 600])
    with pytest.raises(RequestError, match="prompt 0 is empty"):
        scheduler.score([[]])
    assert scheduler.score([]) == []


def test_what_an_update_means_is_passed_on(model: LoadedModel) -> None:
    made = InferenceScheduler(model, model.tokenizer, on_update="drain", cache_on_update="flush")
    assert made.engine.on_update == "drain"
    with pytest.raises(ConfigError, match="on_update"):
        InferenceScheduler(model, model.tokenizer, on_update="never")  # type: ignore[arg-type]


def test_weights_are_cast_only_when_asked(model: LoadedModel) -> None:
    same = InferenceScheduler(model, model.tokenizer, device="cpu", dtype=np.float32)
    assert same.engine.runner.params["embed"].unsafe_buffer_pointer() == model.params["embed"].unsafe_buffer_pointer()
    half = InferenceScheduler(model, model.tokenizer, dtype="bfloat16")
    assert half.engine.runner.params["embed"].dtype == "bfloat16"
