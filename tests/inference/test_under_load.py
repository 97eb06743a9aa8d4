"""Swaps of weights while four threads ask, preempted prompts with log-probs, the penalty window, and what is compiled twice."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from upweight.inference.engine import Engine
from upweight.inference.gather import answers_to
from upweight.inference.programs import token_bytes
from upweight.inference.types import FinishReason, GenerationOutput, SamplingParams
from upweight.models.decoder import Decoder
from upweight.models.layers import Params
from upweight.weights.loading import LoadedModel

PROMPTS = [[5, 6, 7, 8, 9], [5, 6, 7, 100, 200], [11], list(range(20, 32))]
GREEDY = SamplingParams(max_tokens=10, temperature=0, ignore_eos=True)
FEW_PAGES, MANY_PAGES = 66, 2000


def engine_of(model: LoadedModel, params: Params, pages: int = MANY_PAGES, **options: Any) -> Engine:
    store = pages * token_bytes(model.config, params)
    return Engine(model.config, params, model.tokenizer, max_rows=4, store_bytes=store, **options).start()


@pytest.fixture(scope="module")
def versions(model: LoadedModel) -> list[Params]:
    embed = model.params["embed"]
    return [dict(model.params, embed=jnp.roll(embed, shift, axis=1)) for shift in (0, 1, 2)]


@pytest.fixture(scope="module")
def expected(model: LoadedModel, versions: list[Params]) -> list[list[list[int]]]:
    """Greedy answers of an engine that never knew other weights, [version][prompt]."""
    engine = engine_of(model, versions[0])
    answers = []
    for number, params in enumerate(versions):
        if number:
            engine.stop()
            engine = engine_of(model, params)
        answers.append([output.token_ids for output in answers_to(engine, PROMPTS, GREEDY)])
    engine.stop()
    return answers


@pytest.mark.parametrize("pages", [FEW_PAGES, MANY_PAGES])
@pytest.mark.parametrize("policy", ["continue", "recompute", "drain", "abort"])
def test_swaps_while_four_threads_ask(
    model: LoadedModel, versions: list[Params], expected: list[list[list[int]]], policy: Any, pages: int
) -> None:
    engine = engine_of(model, versions[0], pages, on_update=policy)
    begun, swapped = threading.Semaphore(0), threading.Event()

    def ask(_: int) -> list[list[GenerationOutput]]:
        rounds = [answers_to(engine, PROMPTS, GREEDY)]
        begun.release()
        while not swapped.is_set():
            rounds.append(answers_to(engine, PROMPTS, GREEDY))
        return [*rounds, answers_to(engine, PROMPTS, GREEDY)]

    with ThreadPoolExecutor(4) as threads:
        asking = [threads.submit(ask, number) for number in range(4)]
        try:
            for _ in asking:
                assert begun.acquire(timeout=60)
            for number in (1, 2):
                engine.set_weights(versions[number], number)
        finally:
            swapped.set()
        asked = [future.result(60) for future in asking]
    engine.stop()
    told = [(index, output) for rounds in asked for answers in rounds for index, output in enumerate(answers)]
    for index, output in told:
        if output.finish_reason is FinishReason.ABORTED:
            assert policy == "abort"
        else:
            assert len(output.token_ids) == 10
            seen = set(output.token_versions)
            # With "continue" a prompt may have been read under older weights than all tokens of its answer.
            if len(seen) == 1 and (policy != "continue" or seen == {0}):
                assert output.token_ids == expected[seen.pop()][index]
    for rounds in asked:  # asked for after the last swap
        assert [output.token_ids for output in rounds[-1]] == expected[2]
    scheduler = engine.scheduler
    assert not scheduler.running
    assert scheduler.pool.num_free + scheduler.prefixes.size == scheduler.pool.num_pages - 1


def test_prompt_logprobs_of_rows_that_are_preempted(model: LoadedModel) -> None:
    asked = [SamplingParams(max_tokens=30, seed=i, ignore_eos=True, prompt_logprobs=True) for i in range(4)]
    large, small = engine_of(model, model.params), engine_of(model, model.params, FEW_PAGES)
    wanted, got = answers_to(large, PROMPTS, asked), answers_to(small, PROMPTS, asked)
    assert small.stats()["preemptions"] > 0
    large.stop()
    small.stop()
    for prompt, one, other in zip(PROMPTS, wanted, got, strict=True):
        assert one.token_ids == other.token_ids
        assert one.prompt_logprobs is not None
        assert other.prompt_logprobs is not None
        assert len(other.prompt_logprobs) == len(prompt)
        assert other.prompt_logprobs[0] is None
        np.testing.assert_allclose(np.array(other.prompt_logprobs[1:]), np.array(one.prompt_logprobs[1:]), atol=2e-5)


def test_the_penalty_window_counts_the_last_tokens_of_prompt_and_answer(model: LoadedModel) -> None:
    engine = engine_of(model, model.params)
    liked = [7, 300, 400]
    penalised = SamplingParams(
        max_tokens=12,
        temperature=0,
        ignore_eos=True,
        frequency_penalty=100.0,
        rep_window=2,
        logit_bias=tuple((token, 100.0) for token in liked),
    )
    tokens = answers_to(engine, [PROMPTS[0]], penalised)[0].token_ids
    engine.stop()
    assert len(set(tokens)) < len(tokens)  # what left the window comes back
    ids = PROMPTS[0] + tokens
    padded = jnp.asarray([ids + [0] * (64 - len(ids))])
    logits = np.array(Decoder(model.config, model.params)(padded)[0], np.float32)
    for at in range(len(PROMPTS[0]), len(ids)):
        row = logits[at - 1].copy()
        row[liked] += 100.0
        np.subtract.at(row, ids[at - 2 : at], 100.0)
        assert ids[at] == row.argmax()


def test_a_second_pass_over_the_same_work_compiles_nothing(model: LoadedModel) -> None:
    compiled: list[float] = []

    def heard(event: str, duration: float, **_: object) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(duration)

    engine = engine_of(model, model.params)
    asked = [SamplingParams(max_tokens=4 + 5 * i, top_p=0.9, seed=i, ignore_eos=True) for i in range(4)]
    jax.monitoring.register_event_duration_secs_listener(heard)
    try:
        answers_to(engine, PROMPTS, asked)
        assert compiled, "the event has another name now"
        before = len(compiled)
        answers_to(engine, PROMPTS, asked)
        assert len(compiled) == before
    finally:
        jax.monitoring.unregister_event_duration_listener(heard)
        engine.stop()
