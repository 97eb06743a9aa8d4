"""The engine when parts of it, its weights or its requests are broken: every request is answered, and each fails alone."""

import dataclasses
import re
import threading
import time
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from upweight.errors import EngineError, RequestError
from upweight.inference.engine import Engine
from upweight.inference.gather import answers_to
from upweight.inference.programs import token_bytes
from upweight.inference.types import FinishReason, GenerationOutput, SamplingParams
from upweight.weights.loading import LoadedModel

PROMPT = list(range(20, 45))
FEW = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)


def started(model: LoadedModel, **options: Any) -> Engine:
    options = {"max_rows": 2} | options
    return Engine(model.config, model.params, model.tokenizer, **options).start()


class Asked:
    """One request and its answer."""

    def __init__(self, engine: Engine, prompt: list[int], params: SamplingParams) -> None:
        self.ended = threading.Event()
        self.outputs: list[GenerationOutput] = []
        engine.submit(prompt, params, self._end)

    def _end(self, output: GenerationOutput) -> None:
        self.outputs.append(output)
        self.ended.set()

    def answer(self) -> GenerationOutput:
        assert self.ended.wait(60)
        assert len(self.outputs) == 1
        return self.outputs[0]


def test_a_recovery_that_fails_ends_the_engine_for_everybody(model: LoadedModel) -> None:
    engine = started(model)

    def fail(*_: object) -> None:
        raise RuntimeError("no memory")

    engine.runner.decode = fail  # type: ignore[method-assign, assignment]
    engine.runner.reset = fail  # type: ignore[method-assign, assignment]
    assert Asked(engine, PROMPT, FEW).answer().finish_reason is FinishReason.ERROR
    assert engine.wait_for_end() == "the engine could not recover: RuntimeError: no memory"
    assert not engine.alive
    with pytest.raises(EngineError, match="could not recover"):
        engine.submit(PROMPT, FEW, print)
    with pytest.raises(EngineError, match="could not recover"):
        engine.set_weights(model.params, 1)
    engine.cancel(1)


def test_a_request_that_meets_a_stopping_engine_is_refused_or_answered(model: LoadedModel) -> None:
    engine = started(model)
    check = engine.check

    def stop_in_between(*given: Any) -> None:
        check(*given)
        engine.stop()

    engine.check = stop_in_between  # type: ignore[method-assign]
    with pytest.raises(EngineError, match="stopped"):
        engine.submit(PROMPT, FEW, print)
    never_started = Engine(model.config, model.params, model.tokenizer, max_rows=2)
    waiting = Asked(never_started, PROMPT, FEW)
    never_started.stop()
    assert waiting.answer().finish_reason is FinishReason.ABORTED


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda params: None, r"weights\['embed'\]: the engine needs shape"),
        (lambda params: {k: v for k, v in params.items() if k != "norm"}, r"weights\['norm'\]: .* nothing was given"),
        (lambda params: dict(params, embed=params["embed"][:, :16]), r"weights\['embed'\]: .* shape \(\d+, 16\)"),
        (lambda params: dict(params, extra=params["norm"]), r"weights\['extra'\]: the engine needs nothing"),
    ],
)
def test_weights_that_do_not_fit_are_refused_and_nothing_changes(model: LoadedModel, change: Any, said: str) -> None:
    engine = started(model)
    before = answers_to(engine, [PROMPT], FEW)[0]
    with pytest.raises(EngineError, match=said):
        engine.set_weights(change(model.params), 5)
    after = answers_to(engine, [PROMPT], FEW)[0]
    assert (after.token_ids, after.token_versions) == (before.token_ids, [0] * 3)
    half = {**model.params, "norm": np.asarray(model.params["norm"], np.float16)}
    assert engine.stats()["weights_transport"] == "in process, arrays shared"
    engine.set_weights(half, 1)
    assert str(engine.stats()["weights_transport"]).startswith("in process, 1 of ")
    assert engine.runner.params["norm"].dtype == jnp.float32
    engine.stop()


@pytest.mark.parametrize(
    ("params", "said"),
    [
        (SamplingParams(stop=(1,)), "stop holds 1"),  # type: ignore[arg-type]
        (SamplingParams(stop=(b"x",)), "stop holds b'x'"),  # type: ignore[arg-type]
        (SamplingParams(stop=("",)), "stop holds ''"),
        (SamplingParams(seed=1.5), "seed is 1.5; it must be a whole number"),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_be_used_is_refused(model: LoadedModel, params: SamplingParams, said: str) -> None:
    engine = Engine(model.config, model.params, model.tokenizer, max_rows=2)
    with pytest.raises(RequestError, match=said):
        engine.submit(PROMPT, params, print)


def test_a_request_whose_parts_break_in_the_loop_fails_alone(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = started(model)
    from upweight.inference.answer import AnswerText

    push = AnswerText.push

    def broken(self: AnswerText, token_id: int) -> None:
        if self._stop == ("break",):
            raise ValueError("no such text")
        push(self, token_id)

    monkeypatch.setattr(AnswerText, "push", broken)
    for _ in range(4):  # more often than the engine would survive failed steps
        bad, good = answers_to(
            engine, [PROMPT] * 2, [SamplingParams(max_tokens=3, ignore_eos=True, stop=("break",)), FEW]
        )
        assert (bad.finish_reason, bad.error) == (FinishReason.ERROR, "ValueError: no such text")
        assert len(good.token_ids) == 3
    engine.stop()


def test_a_version_number_that_comes_twice_brings_no_old_keys(model: LoadedModel) -> None:
    engine = started(model)
    other = dict(model.params, embed=jnp.flip(model.params["embed"], axis=1))
    began, hold = threading.Event(), threading.Event()
    ended = threading.Event()

    def wait_once(_: object) -> None:
        if not began.is_set():
            began.set()
            hold.wait(60)

    long = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
    engine.submit(PROMPT, long, lambda _: ended.set(), on_text=wait_once)
    assert began.wait(60)
    swap = threading.Thread(target=engine.set_weights, args=(other, 0))
    swap.start()
    hold.set()
    swap.join(60)
    assert ended.wait(60)
    found = answers_to(engine, [PROMPT], FEW)[0]
    engine.stop()
    cold = Engine(model.config, other, model.tokenizer, max_rows=2).start()
    expected = answers_to(cold, [PROMPT], FEW)[0]
    cold.stop()
    assert found.cached_tokens == 0
    assert (found.token_ids, found.logprobs) == (expected.token_ids, expected.logprobs)


def test_what_a_preempted_row_computes_again_is_no_cache_hit(model: LoadedModel) -> None:
    small = started(model, max_rows=4, store_bytes=70 * token_bytes(model.config, model.params))
    prompts = [[100 * i + j for j in range(25)] for i in range(1, 5)]
    outputs = answers_to(small, prompts, SamplingParams(max_tokens=30, seed=1, ignore_eos=True))
    assert small.stats()["preemptions"] > 0
    assert [output.cached_tokens for output in outputs] == [0] * 4
    assert small.stats()["prefix_hit_rate"] == 0
    small.stop()


def test_scores_of_a_prompt_are_of_one_set_of_weights(model: LoadedModel) -> None:
    """The weights change while a long prompt is scored in pieces."""
    other = dict(model.params, embed=jnp.flip(model.params["embed"], axis=1))
    ids = [(7 * i) % 500 + 3 for i in range(400)]
    score = SamplingParams(max_tokens=0, prompt_logprobs=True)
    cold = Engine(model.config, other, model.tokenizer, max_rows=2).start()
    expected = answers_to(cold, [ids], score)[0].prompt_logprobs
    cold.stop()
    engine = started(model)
    prefill = engine.runner.prefill
    first, go = threading.Event(), threading.Event()

    def slow(pieces: Any) -> Any:
        done = prefill(pieces)
        if pieces and pieces[0].row.only_scored and not first.is_set():
            first.set()
            go.wait(60)
        return done

    engine.runner.prefill = slow  # type: ignore[method-assign]
    engine.scheduler.prefill_budget = 100
    scored = Asked(engine, ids, score)
    assert first.wait(60)
    swap = threading.Thread(target=engine.set_weights, args=(other, 1))
    swap.start()
    while not engine._orders:
        time.sleep(0.001)
    go.set()
    swap.join(60)
    found = scored.answer().prompt_logprobs
    engine.stop()
    assert found is not None
    assert expected is not None
    np.testing.assert_allclose(np.array(found[1:], float), np.array(expected[1:], float), atol=5e-5)


def test_scores_and_draws_that_are_not_numbers_are_failures(model: LoadedModel) -> None:
    sick = Engine(model.config, dict(model.params, norm=model.params["norm"] * jnp.nan), model.tokenizer, max_rows=2)
    sick.start()
    output = answers_to(sick, [PROMPT], SamplingParams(max_tokens=0, prompt_logprobs=True))[0]
    sick.stop()
    assert output.finish_reason is FinishReason.ERROR
    engine = started(model)
    everything = frozenset(range(model.config.vocab_size))
    with pytest.raises(RequestError, match=r"min_tokens is 2, but all .* token ids are stop ids"):
        engine.submit(PROMPT, SamplingParams(max_tokens=3, min_tokens=2, stop_ids=everything), print)
    others = everything - set(model.tokenizer.eos_ids)
    nothing_left = SamplingParams(max_tokens=3, min_tokens=2, stop_ids=others)
    bad, good = answers_to(engine, [PROMPT] * 2, [nothing_left, FEW])
    assert bad.error == "EngineError: stop ids, bias and constraint leave no token that may be drawn"
    assert len(good.token_ids) == 3
    engine.stop()


def test_scores_that_are_not_numbers_fail_their_row_alone(model: LoadedModel) -> None:
    """The row would have decoded in the same step as the others."""
    embed = model.params["embed"]
    config = dataclasses.replace(model.config, tied=False)
    params = dict(model.params, embed=embed.at[77].set(jnp.nan), head=embed)
    engine = Engine(config, params, model.tokenizer, max_rows=4).start()
    scored = SamplingParams(max_tokens=3, ignore_eos=True, prompt_logprobs=True)
    bad, *good = answers_to(engine, [[5, 77, 6, 9], PROMPT, PROMPT[:3]], [scored, FEW, FEW])
    engine.stop()
    assert bad.error == "EngineError: the model gave logits that are not finite"
    assert [len(output.token_ids) for output in good] == [3, 3]


@pytest.mark.parametrize(
    ("prompt", "change", "timeout", "said"),
    [
        (PROMPT, {"top_logprobs": 2.0}, None, "top_logprobs is 2.0; it must be a whole number"),
        (PROMPT, {"rep_window": 1.5, "frequency_penalty": 1.0}, None, "rep_window is 1.5; it must be a whole number"),
        (PROMPT, {"top_p": "a"}, None, "top_p is 'a'; it must be a number"),
        ([1.5], {}, None, "1.5 is no token id, which is a whole number"),
        (PROMPT, {}, float("nan"), "timeout is nan; it must be a number of seconds from 0, or None"),
        (PROMPT, {}, "3", "timeout is '3'"),
    ],
)
def test_what_would_break_a_step_is_refused_before(
    model: LoadedModel, prompt: Any, change: dict[str, Any], timeout: Any, said: str
) -> None:
    engine = Engine(model.config, model.params, model.tokenizer, max_rows=2)
    with pytest.raises(RequestError, match=re.escape(said)):
        engine.submit(prompt, SamplingParams(**{"max_tokens": 3, **change}), print, timeout=timeout)


def test_the_queue_counts_what_waits(model: LoadedModel) -> None:
    engine = started(model, max_queue=1)
    hold, began = threading.Event(), threading.Event()

    def wait(_: object) -> None:
        began.set()
        hold.wait(60)

    engine.submit(PROMPT, SamplingParams(max_tokens=40, ignore_eos=True), print, on_text=wait)
    assert began.wait(60)
    waiting = Asked(engine, PROMPT, FEW)  # one runs, none waits
    hold.set()
    assert len(waiting.answer().token_ids) == 3
    engine.stop()
