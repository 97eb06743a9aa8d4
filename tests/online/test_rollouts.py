"""Rows that fail, versions, evaluation mode, rewards of every kind, and what a content key covers."""

import asyncio
import gc
import logging
import threading
import weakref
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from upweight.inference import FinishReason, GenerationOutput, InferenceScheduler
from upweight.models.decoder import Decoder
from upweight.online import BaseRewardModel, RolloutGenerator, RolloutRunner, SamplingTransform
from upweight.online.runner import content_key
from upweight.weights.loading import LoadedModel


def output(ids: list[int], reason: FinishReason = FinishReason.LENGTH, **changes: Any) -> GenerationOutput:
    numbers = [-float(i) for i in ids]
    made = GenerationOutput(
        token_ids=ids,
        logprobs=numbers,
        raw_logprobs=numbers,
        token_versions=[0] * len(ids),
        finish_reason=reason,
        text="t",
    )
    return replace(made, **changes)


class Told:
    """A scheduler that gives fixed answers and remembers what it was asked."""

    def __init__(self, *outputs: GenerationOutput) -> None:
        self.outputs = list(outputs)

    def run_batch(self, prompts: list[list[int]], **options: Any) -> list[GenerationOutput]:
        self.prompts, self.options = prompts, options
        return self.outputs


def generator_of(model: LoadedModel, *outputs: GenerationOutput, group_size: int = 2) -> RolloutGenerator:
    scheduler: Any = Told(*outputs)
    return RolloutGenerator(scheduler, model.tokenizer, max_tokens=4, group_size=group_size)


class Reward(BaseRewardModel):
    def __init__(self, value: Any) -> None:
        self.value = value

    def score(self, prompts: list[str], responses: list[list[str]]) -> Any:
        self.given = (prompts, responses)
        return self.value() if callable(self.value) else self.value


def test_all_copies_go_to_the_engine_in_one_call(model: LoadedModel) -> None:
    generator = generator_of(model, output([5]), output([6, 7]), output([8]), output([9]))
    rollout = generator.generate({"input_ids": [[1, 7], [3, 4]]})
    scheduler: Any = generator.scheduler
    assert scheduler.prompts == [[1, 7], [1, 7], [3, 4], [3, 4]]
    assert rollout.responses.tolist() == [[[5, 0], [6, 7]], [[8, 0], [9, 0]]]
    assert rollout.response_mask.tolist() == [[[True, False], [True, True]], [[True, False], [True, False]]]
    assert rollout.logprobs_old.tolist() == [[[-5, 0], [-6, -7]], [[-8, 0], [-9, 0]]]
    assert rollout.transform == SamplingTransform()
    assert scheduler.options["top_k"] == 0


def test_answers_that_do_not_fit_the_request(model: LoadedModel) -> None:
    with pytest.raises(RuntimeError, match="gave 1 answers for 2 prompts"):
        generator_of(model, output([5])).generate({"input_ids": [[1]]})
    with pytest.raises(RuntimeError, match="answer 1 has 2 tokens and 1 log-probs"):
        generator_of(model, output([5]), output([5, 6], logprobs=[-1.0])).generate({"input_ids": [[1]]})


@pytest.mark.parametrize("reason", [FinishReason.ABORTED, FinishReason.ERROR])
def test_a_row_that_broke_off_counts_as_none(
    model: LoadedModel, reason: FinishReason, caplog: pytest.LogCaptureFixture
) -> None:
    broken = output([5, 6, 7], reason, error="the device is gone")
    generator = generator_of(model, broken, output([8]))
    reward = Reward([[float("nan"), 1]])
    with caplog.at_level(logging.WARNING):
        result, _ = RolloutRunner(generator, reward)({"input_ids": [[1]]})
    assert result.response_mask.tolist() == [[[False], [True]]]
    assert result.valid is not None
    assert result.valid.tolist() == [[False, True]]
    assert result.rewards.tolist() == [[0.0, 1.0]]
    assert result.weights_version is not None
    assert result.weights_version.tolist() == [[-1, 0]]
    assert reward.given[1] == [["", "t"]]
    assert result.finish_reasons == [[str(reason), "length"]]
    assert [record.getMessage() for record in caplog.records] == [
        "1 of 2 responses could not be produced and are left out; the first: the device is gone"
    ]


def test_a_prompt_that_does_not_fit_is_told_once(
    model: LoadedModel, scheduler: InferenceScheduler, caplog: pytest.LogCaptureFixture
) -> None:
    generator = RolloutGenerator(scheduler, model.tokenizer, max_tokens=2, group_size=2, ignore_eos=True)
    with caplog.at_level(logging.WARNING):
        RolloutRunner(generator, Reward([[1, 2], [3, 4]]))({"input_ids": [[5] * 600, [5, 6]]})
    assert [r.getMessage() for r in caplog.records if "could not be produced" in r.getMessage()] == [
        "2 of 4 responses could not be produced and are left out; the first: the prompt has 600 tokens, 511 fit"
    ]
    assert "not answered" not in caplog.text


def test_versions_of_tokens_when_weights_changed_meanwhile(model: LoadedModel) -> None:
    changed = output([5, 6, 7], token_versions=[3, 3, 4])
    rollout = generator_of(model, changed, output([8], token_versions=[3])).generate({"input_ids": [[1]]})
    assert rollout.weights_version is not None
    assert rollout.weights_version.tolist() == [[3, 3]]
    assert rollout.token_versions is not None
    assert rollout.token_versions.tolist() == [[[3, 3, 4], [3, -1, -1]]]
    same = generator_of(model, output([5, 6]), output([8], token_versions=[1])).generate({"input_ids": [[1]]})
    assert same.token_versions is None
    assert same.weights_version is not None
    assert same.weights_version.tolist() == [[0, 1]]


class WithDropout(Decoder):
    def __init__(self, model: LoadedModel) -> None:
        super().__init__(model.config, model.params)
        self.first = nnx.Dropout(0.5, deterministic=False, rngs=nnx.Rngs(0))
        self.second = nnx.Dropout(0.5, deterministic=True, rngs=nnx.Rngs(0))
        self.third = nnx.BatchNorm(2, use_running_average=False, rngs=nnx.Rngs(0))

    def modes(self) -> list[bool | None]:
        return [self.first.deterministic, self.second.deterministic, self.third.use_running_average]


@pytest.mark.parametrize("fails", [False, True])
def test_the_model_is_in_evaluation_mode_meanwhile(model: LoadedModel, fails: bool) -> None:
    module = WithDropout(model)
    seen = []

    class Watching(Told):
        def run_batch(self, prompts: list[list[int]], **options: Any) -> list[GenerationOutput]:
            seen.append(module.modes())
            if fails:
                raise OSError("gone")
            return super().run_batch(prompts, **options)

    scheduler: Any = Watching(output([5]))
    scheduler.model = module
    generator = RolloutGenerator(scheduler, model.tokenizer, group_size=1)
    if fails:
        with pytest.raises(OSError, match="gone"):
            generator.generate({"input_ids": [[1]]})
    else:
        generator.generate({"input_ids": [[1]]})
    assert seen == [[True, True, True]]
    assert module.modes() == [False, True, False]


class Duck:
    """A tensor of another library: numpy can read it, nothing else is known."""

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return np.array([[1, 2]], dtype or np.int64)


@pytest.mark.parametrize(
    "value", [[[1, 2]], ((1.0, 2.0),), np.array([[1, 2]]), jnp.asarray([[1, 2]], jnp.bfloat16), Duck(), [[True, 2]]]
)
def test_rewards_of_every_kind(model: LoadedModel, value: Any) -> None:
    result, _ = RolloutRunner(generator_of(model, output([5]), output([6])), Reward(value))({"input_ids": [[1]]})
    assert result.rewards.dtype == jnp.float32
    assert result.rewards.tolist() == [[1.0, 2.0]]
    assert result.rewards.devices() == result.prompts.devices()


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ([1, 2], r"score returned shape \(2,\); expected \[B, G\] = \(1, 2\)"),
        ([[1], [2]], r"score returned shape \(2, 1\)"),
        ([[1, 2], [3]], r"score returned list, which is no array of numbers .*expected \[B, G\] = \(1, 2\)"),
        ([["good", "bad"]], "which is no array of numbers"),
        (None, r"expected \[B, G\] = \(1, 2\)"),
        ([[1, float("inf")]], "score returned inf for prompt 0, response 1; rewards must be finite"),
        ([[1, 1e300]], "score returned inf for prompt 0, response 1"),
    ],
)
def test_unusable_rewards_are_named(model: LoadedModel, value: Any, said: str) -> None:
    runner = RolloutRunner(generator_of(model, output([5]), output([6])), Reward(value))
    with pytest.raises(ValueError, match=said):
        runner({"input_ids": [[1]]})
    runner.reward_model = Reward([[1, 2]])
    assert runner({"input_ids": [[1]]})[1], "a rollout that could not be scored is not kept"


class Client:
    """Like HTTP clients, it may only be used in the loop that it was first used in."""

    loop: Any = None

    async def ask(self) -> float:
        await asyncio.sleep(0)
        running = asyncio.get_running_loop()
        assert self.loop in (None, running)
        self.loop = running
        return 1.0


def test_async_rewards_from_inside_a_running_loop(model: LoadedModel) -> None:
    client = Client()

    class Remote(BaseRewardModel):
        async def score(self, prompts: Any, responses: Any, *, finish_reasons: Any) -> Any:  # type: ignore[override]
            assert finish_reasons == [["length", "length"]]
            return [list(await asyncio.gather(client.ask(), client.ask()))]

    runner = RolloutRunner(generator_of(model, output([5]), output([6])), Remote())

    async def inside() -> Any:
        return runner({"input_ids": [[1]]})

    assert asyncio.run(inside())[0].rewards.tolist() == [[1.0, 1.0]]
    runner.clear_cache()
    assert runner({"input_ids": [[1]]})[1]

    class Failing(BaseRewardModel):
        async def score(self, prompts: Any, responses: Any) -> Any:  # type: ignore[override]
            raise OSError("service down")

    runner.reward_model = Failing()
    runner.clear_cache()
    with pytest.raises(OSError, match="service down"):
        runner({"input_ids": [[1]]})


def test_what_a_reward_model_may_ask_for(model: LoadedModel) -> None:
    given: dict[str, Any] = {}

    class All(BaseRewardModel):
        def score(self, prompts: Any, responses: Any, **more: Any) -> Any:
            given.update(more)
            return [[0, 1]]

    RolloutRunner(generator_of(model, output([5, 6]), output([7])), All())({"input_ids": [[1]], "metadata": [{"a": 1}]})
    assert given == {"metadata": [{"a": 1}], "token_ids": [[[5, 6], [7]]], "finish_reasons": [["length", "length"]]}


def test_groups_without_variance_are_counted(model: LoadedModel) -> None:
    outputs = [output([5])] * 5 + [output([], FinishReason.ABORTED)]
    generator = generator_of(model, *outputs)
    result, _ = RolloutRunner(generator, Reward([[1, 1], [0, 1], [0, 7]]))({"input_ids": [[1], [3], [4]]})
    assert result.zero_variance_groups == 1


def test_content_keys() -> None:
    base = {"input_ids": [[1, 2]], "attention_mask": [[1, 1]]}
    same = [
        {"input_ids": np.array([[1, 2]]), "attention_mask": jnp.asarray([[1, 1]])},
        {"attention_mask": ((1, 1),), "input_ids": ((1, 2),), "labels": "not of the prompt"},
    ]
    assert {content_key(batch) for batch in same} == {content_key(base)}
    message = {"role": "user", "content": "Q"}
    others = [
        {"input_ids": [[1, 3]], "attention_mask": [[1, 1]]},
        {"input_ids": [[1, 2]], "attention_mask": [[0, 1]]},
        {"input_ids": [[1, 2]]},
        {"prompts": [[1, 2]]},
        {"messages": [[message]]},
        {"messages": [[message | {"content": "R"}]]},
        {"instruction": ["a"]},
        {"instruction": ["a"], "input": ["b"]},
        {"instruction": ["a"], "output": ["b"]},
        base | {"metadata": [{"answer": 1}]},
        base | {"metadata": [{"answer": "1"}]},
        base | {"metadata": [{"answer": b"1"}]},
        base | {"metadata": [{"answer": {1}}]},
        base | {"metadata": [{1: "a"}]},
        base | {"metadata": [{"1": "a"}]},
    ]
    assert len({content_key(batch) for batch in [base, *others]}) == 1 + len(others)


def test_what_cannot_be_compared_is_named() -> None:
    with pytest.raises(ValueError, match=r"metadata holds <function .*> at .*cannot be compared between batches"):
        content_key({"input_ids": [[1]], "metadata": [{"grade": lambda text: 1.0}]})
    with pytest.raises(ValueError, match=r"metadata holds .*lock"):
        content_key({"input_ids": [[1]], "metadata": [{"lock": threading.Lock()}]})


def test_a_result_that_no_call_can_get_is_let_go(model: LoadedModel) -> None:
    runner = RolloutRunner(generator_of(model, output([5]), output([6])), Reward([[0, 1]]), rollout_interval=2)
    result = weakref.ref(runner({"input_ids": [[1]]})[0])
    runner.step()
    gc.collect()
    assert result() is not None
    runner.step()
    gc.collect()
    assert result() is None


def test_several_batches_are_replayed_for_epochs(model: LoadedModel) -> None:
    generator = generator_of(model, output([5]), output([6]))
    made = []

    class Counting(Reward):
        def score(self, prompts: list[str], responses: list[list[str]]) -> Any:
            made.append(prompts)
            return [[0, 1]]

    runner = RolloutRunner(generator, Counting(None), rollout_interval=9)
    batches = [{"input_ids": np.array([[i]])} for i in (1, 3, 4)]
    log: list[tuple[int, bool]] = []
    results: dict[int, Any] = {}
    for _ in range(4):
        for i, batch in enumerate(batches):
            result, fresh = runner(batch)
            assert fresh or result is results[i]
            results[i] = result
            log.append((i, fresh))
            runner.step()
    fresh_at = [step for step, (_, fresh) in enumerate(log) if fresh]
    assert fresh_at == [0, 1, 2, 9, 10, 11]  # each rollout serves nine optimizer steps: three epochs of three batches
    assert len(made) == 6
    for wrong in (0, 1.5, None, "9", True):
        with pytest.raises(ValueError, match=f"rollout_interval is {wrong!r}; it must be a whole number of at least 1"):
            RolloutRunner(generator, Counting(None), rollout_interval=wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="batch is list; it must be a mapping"):
        runner([[1, 2]])  # type: ignore[arg-type]


def test_bad_sizes_are_named(model: LoadedModel) -> None:
    for name in ("group_size", "max_tokens"):
        for wrong in (0, 2.5, None, True):
            with pytest.raises(ValueError, match=f"{name} is {wrong}; it must be a whole number of at least 1"):
                RolloutGenerator(Told(), model.tokenizer, **{name: wrong})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"temperature": None}, "temperature is None"),
        ({"temperature": -1}, "temperature is -1.0; it must be from 0"),
        ({"top_k": None}, "top_k is None"),
        ({"top_p": 2}, "top_p is 2.0; it must be from 0 to 1"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty is nan"),
        ({"seed": "a"}, "seed is 'a'; it must be a number"),
        ({"stop": ""}, "each stop string must be a text that is not empty"),
    ],
)
def test_settings_that_draw_nothing_are_named_at_construction(model: LoadedModel, setting: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        RolloutGenerator(Told(), model.tokenizer, **setting)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [-100, 10**10])
def test_ids_that_no_tokenizer_has_are_named(model: LoadedModel, wrong: int) -> None:
    generator = RolloutGenerator(Told(), model.tokenizer)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=rf"input_ids\[1\] holds {wrong}; a token id is a whole number from 0"):
        generator.generate({"input_ids": [[1, 2], [wrong, 4]]})
