"""The engine against full forward passes of the same weights, on a tiny model with a real tokenizer."""

import threading
from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np
import pytest

from upweight.errors import RequestError
from upweight.inference.engine import Engine, EngineBusy
from upweight.inference.gather import answers_to
from upweight.inference.types import FinishReason, GenerationOutput, SamplingParams, TextPiece
from upweight.weights.loading import LoadedModel


@pytest.fixture(scope="module")
def engine(model: LoadedModel) -> Iterator[Engine]:
    running = Engine(model.config, model.params, model.tokenizer, max_rows=8).start()
    yield running
    running.stop()


def full_logprobs(model: LoadedModel, prompt: list[int], output: list[int], params: dict | None = None) -> np.ndarray:
    """[len(output), V] raw log-probs by one forward pass over everything."""
    from upweight.models.decoder import Decoder

    ids = prompt + output
    padded = jnp.asarray([ids + [0] * (64 - len(ids))])
    logits = Decoder(model.config, params or model.params)(padded)[0, len(prompt) - 1 : len(ids) - 1]
    logits = np.asarray(logits, np.float64)
    return (
        logits
        - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
        - logits.max(-1, keepdims=True)
    )


PROMPTS = [[5, 6, 7, 8, 9], [5, 6, 7, 100, 200, 300, 400], [11], list(range(20, 45))]


def test_sampled_logprobs_are_those_of_a_full_forward_pass(model: LoadedModel, engine: Engine) -> None:
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    for prompt, output in zip(PROMPTS, answers_to(engine, PROMPTS, params), strict=True):
        assert len(output.token_ids) == 12
        expected = full_logprobs(model, prompt, output.token_ids)[np.arange(12), output.token_ids]
        np.testing.assert_allclose(output.raw_logprobs, expected, atol=2e-5)
        assert output.logprobs == output.raw_logprobs
        assert output.finish_reason is FinishReason.LENGTH


def test_temperature_and_filters_report_the_distribution_drawn_from(model: LoadedModel, engine: Engine) -> None:
    params = SamplingParams(max_tokens=10, temperature=0.7, top_k=20, top_p=0.8, ignore_eos=True, seed=4)
    for prompt, output in zip(PROMPTS, answers_to(engine, PROMPTS, params), strict=True):
        raw = full_logprobs(model, prompt, output.token_ids)
        for step, token in enumerate(output.token_ids):
            scaled = raw[step] / 0.7
            kept = scaled >= np.sort(scaled)[-20]
            p = np.where(kept, np.exp(scaled - scaled.max()), 0.0)
            p /= p.sum()
            order = np.argsort(-p)
            nucleus = order[: int(np.searchsorted(np.cumsum(p[order]), 0.8)) + 1]
            assert token in nucleus
            assert output.logprobs[step] == pytest.approx(np.log(p[token] / p[nucleus].sum()), abs=3e-5)
            assert output.raw_logprobs[step] == pytest.approx(raw[step, token], abs=2e-5)
            whole = scaled[token] - np.log(np.exp(scaled).sum())
            assert output.tempered_logprobs[step] == pytest.approx(whole, abs=3e-5)


def test_greedy_ignores_filters_and_batch_mates(model: LoadedModel, engine: Engine) -> None:
    greedy = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    alone = answers_to(engine, [PROMPTS[0]], greedy)[0]
    noisy = [SamplingParams(max_tokens=8, ignore_eos=True, top_p=0.5, seed=i) for i in range(3)]
    mixed = answers_to(engine, [*PROMPTS[1:], PROMPTS[0]], [*noisy, SamplingParams(**{**vars(greedy), "top_k": 3})])[3]
    assert mixed.token_ids == alone.token_ids
    assert mixed.logprobs == mixed.raw_logprobs
    assert mixed.tempered_logprobs == []  # told only where it is a third number
    assert alone.token_ids == full_logprobs(model, PROMPTS[0], alone.token_ids).argmax(-1).tolist()


def test_a_seed_fixes_the_answer_whatever_runs_beside(engine: Engine) -> None:
    seeded = SamplingParams(max_tokens=16, temperature=20.0, seed=2**40 + 3, ignore_eos=True)
    first = answers_to(engine, [PROMPTS[0]], seeded)[0]
    others = SamplingParams(max_tokens=9, ignore_eos=True)
    again = answers_to(engine, [*PROMPTS, PROMPTS[0]], [others] * 4 + [seeded])[4]
    assert again.token_ids == first.token_ids
    assert first.seed == 2**40 + 3
    fresh = answers_to(engine, [PROMPTS[0]] * 2, SamplingParams(max_tokens=16, temperature=50.0, ignore_eos=True))
    assert fresh[0].seed != fresh[1].seed
    assert fresh[0].token_ids != fresh[1].token_ids


def test_a_group_shares_its_prompt(model: LoadedModel) -> None:
    with_group = Engine(model.config, model.params, model.tokenizer, max_rows=8).start()
    outputs = answers_to(with_group, [PROMPTS[3]] * 8, SamplingParams(max_tokens=2, ignore_eos=True))
    assert with_group.stats()["prefilled_tokens"] == len(PROMPTS[3]) - 1
    assert sorted(o.cached_tokens for o in outputs) == [0] + [len(PROMPTS[3]) - 1] * 7
    with_group.stop()


def test_stop_ids_and_strings(model: LoadedModel, engine: Engine) -> None:
    greedy = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    whole = answers_to(engine, [PROMPTS[0]], greedy)[0]
    stop_at = whole.token_ids[3]
    by_id = answers_to(
        engine, [PROMPTS[0]], SamplingParams(max_tokens=12, temperature=0, stop_ids=frozenset([stop_at]))
    )[0]
    cut = whole.token_ids.index(stop_at) + 1
    assert by_id.token_ids == whole.token_ids[:cut]
    assert by_id.finish_reason is FinishReason.STOP
    assert by_id.text == model.tokenizer.decode(whole.token_ids[: cut - 1])
    assert len(whole.text) > 6
    needle = whole.text[3:6]
    by_text = answers_to(
        engine, [PROMPTS[0]], SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, stop=(needle,))
    )[0]
    assert by_text.text == whole.text[: whole.text.index(needle)]
    assert by_text.finish_reason is FinishReason.STOP
    assert by_text.token_ids == whole.token_ids[: len(by_text.token_ids)]
    assert needle in model.tokenizer.decode(by_text.token_ids)
    assert needle not in model.tokenizer.decode(by_text.token_ids[:-1])


def test_streamed_text_is_the_answer(engine: Engine) -> None:
    pieces: list[TextPiece] = []
    done: list[GenerationOutput] = []
    finished = threading.Event()

    def end(output: GenerationOutput) -> None:
        done.append(output)
        finished.set()

    params = SamplingParams(max_tokens=20, seed=1, ignore_eos=True, stop=("never said",))
    engine.submit(PROMPTS[0], params, end, on_text=pieces.append)
    assert finished.wait(60)
    assert "".join(piece.text for piece in pieces) == done[0].text
    assert len(pieces) > 3
    for name, values in done[0].lists().items():
        assert [value for piece in pieces for value in piece.lists()[name]] == values, name


def test_new_weights_take_over_between_steps_and_no_old_key_is_used(model: LoadedModel) -> None:
    changed = dict(model.params, embed=model.params["embed"] * 0.9)
    live = Engine(model.config, model.params, model.tokenizer, max_rows=4).start()
    before = live.fingerprint()
    answers_to(live, [PROMPTS[3]], SamplingParams(max_tokens=4, ignore_eos=True))
    after = live.set_weights(changed, 1)
    assert after == live.fingerprint() != before
    warm = answers_to(live, [PROMPTS[3]], SamplingParams(max_tokens=8, temperature=0, ignore_eos=True))[0]
    live.stop()
    cold = Engine(model.config, changed, model.tokenizer, max_rows=4, version=1).start()
    expected = answers_to(cold, [PROMPTS[3]], SamplingParams(max_tokens=8, temperature=0, ignore_eos=True))[0]
    cold.stop()
    assert warm.token_ids == expected.token_ids
    assert warm.logprobs == expected.logprobs  # bit-equal
    assert warm.token_versions == [1] * 8


def test_rows_that_live_through_a_swap_say_so(model: LoadedModel) -> None:
    live = Engine(model.config, model.params, model.tokenizer, max_rows=4).start()
    done: list[GenerationOutput] = []
    finished, started = threading.Event(), threading.Event()

    def end(output: GenerationOutput) -> None:
        done.append(output)
        finished.set()

    live.submit(
        PROMPTS[0],
        SamplingParams(max_tokens=400, ignore_eos=True, seed=3),
        end,
        on_text=lambda _: started.set(),
    )
    assert started.wait(60)
    live.set_weights(dict(model.params), 1)
    assert finished.wait(120)
    live.stop()
    versions = done[0].token_versions
    assert versions == sorted(versions)
    assert set(versions) == {0, 1}


def test_small_store_preempts_and_gives_the_same_answers(model: LoadedModel, engine: Engine) -> None:
    params = [SamplingParams(max_tokens=30, seed=i, ignore_eos=True) for i in range(4)]
    expected = answers_to(engine, PROMPTS, params)
    from upweight.inference.programs import token_bytes

    small = Engine(
        model.config,
        model.params,
        model.tokenizer,
        max_rows=4,
        store_bytes=70 * token_bytes(model.config, model.params),
    )
    small.start()
    outputs = answers_to(small, PROMPTS, params)
    assert small.stats()["preemptions"] > 0
    small.stop()
    assert [o.token_ids for o in outputs] == [o.token_ids for o in expected]


def test_a_prompt_that_cannot_fit_is_rejected_and_others_are_not_disturbed(model: LoadedModel, engine: Engine) -> None:
    outputs = answers_to(engine, [[1] * 600, PROMPTS[0]], SamplingParams(max_tokens=3, ignore_eos=True))
    assert outputs[0].finish_reason is FinishReason.REJECTED
    assert outputs[0].token_ids == []
    assert outputs[0].error == "the prompt has 600 tokens, 511 fit"
    assert len(outputs[1].token_ids) == 3


def test_cancel_and_deadline(model: LoadedModel, engine: Engine) -> None:
    done: list[GenerationOutput] = []
    finished = threading.Semaphore(0)

    def end(output: GenerationOutput) -> None:
        done.append(output)
        finished.release()

    number = engine.submit(PROMPTS[0], SamplingParams(max_tokens=500, ignore_eos=True), end)
    engine.cancel(number)
    engine.submit(PROMPTS[0], SamplingParams(max_tokens=500, ignore_eos=True), end, timeout=0.0)
    assert finished.acquire(timeout=60)
    assert finished.acquire(timeout=60)
    assert {output.finish_reason for output in done} == {FinishReason.ABORTED}
    assert engine.stats()["active_tasks"] == 0


@pytest.mark.parametrize(
    ("prompt", "params", "said"),
    [
        ([], SamplingParams(), "the prompt is empty"),
        ([49152], SamplingParams(), "token id 49152 is outside the vocabulary of 49152"),
        ([-1], SamplingParams(), "token id -1 is outside"),
        ([1], SamplingParams(temperature=-0.1), "temperature is -0.1; it must be from 0"),
        ([1], SamplingParams(temperature=float("nan")), "temperature is nan"),
        ([1], SamplingParams(top_p=1.5), "top_p is 1.5; it must be from 0 to 1"),
        ([1], SamplingParams(max_tokens=-1), "max_tokens is -1"),
    ],
)
def test_bad_requests_name_field_and_value(
    engine: Engine, prompt: list[int], params: SamplingParams, said: str
) -> None:
    with pytest.raises(RequestError, match=said):
        engine.submit(prompt, params, lambda _: None)


def test_full_queue_and_failing_callbacks(model: LoadedModel) -> None:
    live = Engine(model.config, model.params, model.tokenizer, max_rows=2, max_queue=2)
    ended = threading.Semaphore(0)

    def bad(output: GenerationOutput) -> None:
        ended.release()
        raise RuntimeError("callback")

    for _ in range(2):
        live.submit([1, 2], SamplingParams(max_tokens=2), bad)
    live._live = {1: None, 2: None}  # type: ignore[dict-item]  # the loop is not running: what is accepted stays queued
    with pytest.raises(EngineBusy, match="2 requests are waiting"):
        live.submit([1, 2], SamplingParams(max_tokens=2), bad)
    live._live = {}
    live.start()
    assert ended.acquire(timeout=60)
    assert ended.acquire(timeout=60)
    assert len(answers_to(live, [[1, 2]], SamplingParams(max_tokens=2, ignore_eos=True))[0].token_ids) == 2
    live.stop()


@pytest.mark.parametrize("cache_bytes", [1 << 30, 0])
def test_prompts_computed_along_with_a_streamed_answer_are_those_of_a_quiet_engine(
    model: LoadedModel, engine: Engine, cache_bytes: int
) -> None:
    prompts = [[7 + at, *range(30, 90), 3 + at] for at in range(3)]
    params = SamplingParams(max_tokens=6, ignore_eos=True, temperature=0)
    quiet = answers_to(engine, prompts, params)
    live = Engine(model.config, model.params, model.tokenizer, max_rows=8, cache_bytes=cache_bytes)
    begun, ended = threading.Event(), threading.Event()
    streamed = SamplingParams(max_tokens=120, ignore_eos=True, temperature=0)
    with live:
        live.submit([11, 12], streamed, lambda _: ended.set(), on_text=lambda _: begun.set())
        assert begun.wait(60)
        beside = answers_to(live, prompts, params)
        assert not ended.is_set()
        stats = live.stats()
    steps, ratios = stats["step_ms"], stats["prefill_steps_in_steps"]
    assert 0 < steps["decode"]["p50"] <= steps["decode"]["p99"] <= steps["decode"]["max"]
    assert 6 <= steps["decode_and_prefill"]["count"] <= 9  # 61 tokens each in pieces of 24 or 32
    assert ratios["count"] <= steps["decode_and_prefill"]["count"]
    assert 0 < ratios["p50"] <= ratios["max"]
    for one, other in zip(quiet, beside, strict=True):
        assert one.token_ids == other.token_ids
        np.testing.assert_allclose(one.raw_logprobs, other.raw_logprobs, atol=1e-5)


def test_a_failing_step_fails_its_rows_and_the_engine_goes_on(model: LoadedModel) -> None:
    live = Engine(model.config, model.params, model.tokenizer, max_rows=2)
    broken = live.runner

    decode = broken.decode

    def explode(rows: object, beside: object) -> None:
        broken.decode = decode  # type: ignore[method-assign]
        raise RuntimeError("device lost")

    broken.decode = explode  # type: ignore[method-assign, assignment]
    live.start()
    failed = answers_to(live, [[1, 2, 3]], SamplingParams(max_tokens=2))[0]
    assert failed.finish_reason is FinishReason.ERROR
    assert failed.error == "RuntimeError: device lost"
    good = answers_to(live, [[1, 2, 3]], SamplingParams(max_tokens=2, ignore_eos=True))[0]
    assert len(good.token_ids) == 2
    live.stop()
    late = pytest.raises(Exception, match="stopped")
    with late:
        live.submit([1], SamplingParams(), lambda _: None)


def test_a_top_k_beyond_the_vocabulary_is_off(engine: Engine) -> None:
    plain = SamplingParams(max_tokens=3, seed=1, ignore_eos=True)
    huge = SamplingParams(max_tokens=3, seed=1, ignore_eos=True, top_k=2**40)
    first, second = answers_to(engine, [PROMPTS[0]] * 2, [plain, huge])
    assert first.token_ids == second.token_ids


def test_a_temperature_that_float32_cannot_divide_by_is_refused(engine: Engine) -> None:
    with pytest.raises(RequestError, match="temperature is 1e-40"):
        engine.submit(PROMPTS[0], SamplingParams(temperature=1e-40), print)


def test_an_engine_that_gave_up_says_why_to_whoever_waits(model: LoadedModel) -> None:
    broken = Engine(model.config, model.params, model.tokenizer, max_rows=2).start()

    def fail(pieces: object) -> None:
        raise ValueError("no device")

    broken.runner.prefill = fail  # type: ignore[method-assign]
    for _ in range(3):
        assert answers_to(broken, [PROMPTS[0]], SamplingParams(max_tokens=2))[0].finish_reason is FinishReason.ERROR
    assert "3 times in a row, last: no device" in (broken.wait_for_end() or "")
