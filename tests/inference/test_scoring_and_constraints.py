"""What a request may ask for beyond tokens: scores of its prompt, alternatives, constraints. Against full forward passes."""

from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np
import pytest

from upweight.errors import RequestError
from upweight.inference.engine import Engine
from upweight.inference.gather import answers_to
from upweight.inference.types import FinishReason, SamplingParams
from upweight.models.decoder import Decoder
from upweight.weights.loading import LoadedModel

PROMPT = list(range(20, 45))


@pytest.fixture(scope="module")
def engine(model: LoadedModel) -> Iterator[Engine]:
    running = Engine(model.config, model.params, model.tokenizer, max_rows=4).start()
    yield running
    running.stop()


def full_logprobs(model: LoadedModel, ids: list[int], temperature: float = 1.0) -> np.ndarray:
    """[len(ids), V] log-probs of what follows each token."""
    padded = jnp.asarray([ids + [0] * (320 - len(ids))])
    logits = np.asarray(Decoder(model.config, model.params)(padded)[0, : len(ids)], np.float64) / temperature
    logits -= logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


@pytest.mark.parametrize("length", [2, 25, 300])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_prompts_are_scored_at_the_temperature_asked_for(
    model: LoadedModel, engine: Engine, length: int, temperature: float
) -> None:
    ids = [(7 * i) % 500 + 3 for i in range(length)]
    score = SamplingParams(max_tokens=0, prompt_logprobs=True, temperature=temperature)
    answers_to(
        engine, [ids], SamplingParams(max_tokens=1, ignore_eos=True)
    )  # the prefix is known: it must not be skipped
    output = answers_to(engine, [ids], score)[0]
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert output.token_ids == []
    assert output.finish_reason is FinishReason.LENGTH
    expected = full_logprobs(model, ids, temperature)[np.arange(length - 1), ids[1:]]
    np.testing.assert_allclose(np.array(output.prompt_logprobs[1:], float), expected, atol=5e-5)


def test_a_prompt_of_one_token_has_nothing_to_score(engine: Engine) -> None:
    output = answers_to(engine, [[5]], SamplingParams(max_tokens=0, prompt_logprobs=True))[0]
    assert output.prompt_logprobs == [None]


def test_scores_come_with_an_answer_too_and_agree_with_its_own(engine: Engine) -> None:
    plain = SamplingParams(max_tokens=10, ignore_eos=True, seed=3)
    output = answers_to(engine, [PROMPT], plain)[0]
    both = answers_to(engine, [PROMPT + output.token_ids], SamplingParams(max_tokens=2, prompt_logprobs=True))[0]
    assert both.prompt_logprobs is not None
    np.testing.assert_allclose(both.prompt_logprobs[len(PROMPT) :], output.raw_logprobs, atol=5e-5)
    assert len(both.token_ids) > 0


def test_alternatives_come_per_token(model: LoadedModel, engine: Engine) -> None:
    asked = SamplingParams(max_tokens=4, ignore_eos=True, top_logprobs=3, temperature=0.5)
    output, other = answers_to(engine, [PROMPT, PROMPT], [asked, SamplingParams(max_tokens=4, ignore_eos=True)])
    expected = full_logprobs(model, PROMPT + output.token_ids, 0.5)[len(PROMPT) - 1 :]
    for step, best in enumerate(output.top_logprobs):
        order = np.argsort(-expected[step])[:3]
        assert [token for token, _ in best] == order.tolist()
        np.testing.assert_allclose([value for _, value in best], expected[step][order], atol=1e-4)
    assert len(output.top_logprobs) == 4
    assert other.top_logprobs == []


class EvenThenStop:
    """Even ids only, twice; then id 7."""

    def __init__(self) -> None:
        self.taken: list[int] = []

    def allowed(self) -> bytes | None:
        return bytes([0x80]) if len(self.taken) == 2 else bytes([0x55] * 100)

    def accept(self, token_id: int) -> None:
        self.taken.append(token_id)


class Broken(EvenThenStop):
    def allowed(self) -> bytes | None:
        if self.taken:
            raise ValueError("grammar is stuck")
        return None


def test_a_constraint_holds_for_its_row_alone(engine: Engine) -> None:
    free = SamplingParams(max_tokens=3, seed=5, ignore_eos=True)
    alone = answers_to(engine, [PROMPT], free)[0]
    bound = SamplingParams(max_tokens=9, constraint=EvenThenStop, stop_ids=frozenset([7]))
    greedy = SamplingParams(max_tokens=9, constraint=EvenThenStop, stop_ids=frozenset([7]), temperature=0)
    outputs = answers_to(engine, [PROMPT] * 3, [bound, greedy, free])
    for output in outputs[:2]:
        assert len(output.token_ids) == 3
        assert output.token_ids[2] == 7
        assert all(token % 2 == 0 and token < 800 for token in output.token_ids[:2])
        assert output.finish_reason is FinishReason.STOP
    assert outputs[0].logprobs[2] == pytest.approx(0.0, abs=1e-6)
    assert outputs[2].token_ids == alone.token_ids


def test_a_constraint_that_fails_takes_its_row_alone(engine: Engine) -> None:
    broken = SamplingParams(max_tokens=9, constraint=Broken, ignore_eos=True)
    free = SamplingParams(max_tokens=3, ignore_eos=True)
    outputs = answers_to(engine, [PROMPT] * 2, [broken, free])
    assert outputs[0].finish_reason is FinishReason.ERROR
    assert outputs[0].error == "ValueError: grammar is stuck"
    assert len(outputs[1].token_ids) == 3


def test_logits_that_are_not_finite_fail_the_row(model: LoadedModel) -> None:
    sick = Engine(model.config, dict(model.params, norm=model.params["norm"] * jnp.nan), model.tokenizer, max_rows=2)
    sick.start()
    output = answers_to(sick, [PROMPT], SamplingParams(max_tokens=3))[0]
    sick.stop()
    assert output.finish_reason is FinishReason.ERROR
    assert "not finite" in (output.error or "")


def test_decode_from_pages_gives_the_same_answers(model: LoadedModel, engine: Engine) -> None:
    """A cache too large for its limit is done without."""
    lean = Engine(model.config, model.params, model.tokenizer, max_rows=4, cache_bytes=0).start()
    prompts = [PROMPT, PROMPT[:3], [11]]
    params = [SamplingParams(max_tokens=12, seed=i, ignore_eos=True) for i in range(3)]
    for one, other in zip(answers_to(lean, prompts, params), answers_to(engine, prompts, params), strict=True):
        assert one.token_ids == other.token_ids
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=2e-5)
    lean.stop()


@pytest.mark.parametrize(
    ("params", "said"),
    [
        (SamplingParams(min_p=1.5), "min_p is 1.5; it must be from 0 to 1"),
        (SamplingParams(presence_penalty=float("nan")), "presence_penalty is nan"),
        (SamplingParams(repetition_penalty=0), "repetition_penalty is 0; it must be from 0.01"),
        (SamplingParams(top_logprobs=21), "top_logprobs is 21; it must be from 0 to 20"),
        (SamplingParams(logit_bias=((5, float("inf")),)), "logit_bias of token 5 is inf; it must be from -100 to 100"),
        (SamplingParams(logit_bias=((-5, 1.0),)), "logit_bias: token id -5 is outside the vocabulary"),
        (SamplingParams(stop_ids=frozenset([10**6])), "stop_ids: token id 1000000 is outside the vocabulary"),
    ],
)
def test_bad_requests_name_field_and_value(engine: Engine, params: SamplingParams, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        engine.submit(PROMPT, params, lambda _: None)
