from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from upweight.errors import ConfigError
from upweight.inference import FinishReason, InferenceScheduler
from upweight.weights.loading import LoadedModel, load_model


@pytest.fixture(scope="module")
def model(tiny_model_folder: Path) -> LoadedModel:
    return load_model(str(tiny_model_folder))


@pytest.fixture(scope="module")
def scheduler(model: LoadedModel) -> Iterator[InferenceScheduler]:
    with InferenceScheduler(model.module(), model.tokenizer, max_batch_size=4) as running:
        yield running


def test_more_prompts_than_slots_are_all_answered_in_order(scheduler: InferenceScheduler) -> None:
    prompts = [[10 + i, 20, 30] for i in range(9)]
    limits = list(range(1, 10))
    answers = scheduler.run_batch(prompts, max_tokens=limits, ignore_eos=True)
    assert [len(answer) for answer in answers] == limits
    again = scheduler.run_batch(prompts, max_tokens=limits, temperature=0, return_logprobs=True, ignore_eos=True)
    alone = [
        scheduler.run_batch([p], max_tokens=n, temperature=0, ignore_eos=True)[0]
        for p, n in zip(prompts, limits, strict=True)
    ]
    assert [tokens for tokens, _ in again] == alone
    assert all(len(tokens) == len(logprobs) for tokens, logprobs in again)


def test_edges(scheduler: InferenceScheduler) -> None:
    assert scheduler.run_batch([]) == []
    assert scheduler.run_batch([[1]], max_tokens=0) == [[]]
    with pytest.raises(ValueError, match="prompt 1 is empty"):
        scheduler.run_batch([[1], []])
    with pytest.raises(ValueError, match="temperature has 1 values for 2 prompts"):
        scheduler.run_batch([[1], [2]], temperature=[0.5])
    details = scheduler.run_batch([[1] * 600, [1]], max_tokens=2, return_details=True, ignore_eos=True)
    assert details[0].finish_reason is FinishReason.REJECTED
    assert len(details[1].token_ids) == 2


@pytest.mark.parametrize(
    ("prompts", "options", "said"),
    [
        ([[1], [5, 1.7]], {}, r"prompt 1\[1\] is 1.7; a token id is a whole number"),
        ([np.array([1.0, np.nan])], {}, r"prompt 0\[1\] is nan"),
        ([[1, None]], {}, r"prompt 0\[1\] is None"),
        ([5, 6, 7], {}, "prompt 0 is 5; it must be a list of token ids"),
        ([[1]], {"stop_ids": [2.5]}, r"stop_ids\[0\] is 2.5"),
        ([[1]], {"stop_ids": 2}, "stop_ids is 2; it must be a list"),
        ([[1]], {"stop": ""}, "stop is ''; each stop string must be a text that is not empty"),
        ([[1]], {"stop": ["a", ""]}, r"stop is \['a', ''\]"),
        ([[1]], {"stop": [7]}, r"stop is \[7\]; each stop string must be a text"),
        ([[1]], {"stop": 7}, "stop is 7; it must be a text or a list of texts"),
        ([[1]], {"stop": b"x"}, "stop is b'x'; it must be a text"),
        ([[1]], {"max_tokens": float("inf")}, "max_tokens is inf; it must be a whole number"),
        ([[1]], {"max_tokens": [float("nan")]}, "max_tokens is nan; it must be a whole number"),
        ([[1]], {"seed": float("inf")}, "seed is inf; it must be a whole number"),
    ],
)
def test_what_is_no_token_id_stop_string_or_number(
    scheduler: InferenceScheduler, prompts: list[Any], options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        scheduler.run_batch(prompts, **{"max_tokens": 1, **options})


def test_whole_floats_are_token_ids(scheduler: InferenceScheduler) -> None:
    options: dict[str, Any] = {"max_tokens": 2, "temperature": 0, "ignore_eos": True}
    assert scheduler.run_batch([np.array([5.0, 6.0])], **options) == scheduler.run_batch([[5, 6]], **options)


def test_least_length_and_penalty_reach_the_sampler(model: LoadedModel, scheduler: InferenceScheduler) -> None:
    greedy = {"max_tokens": 12, "temperature": 0}
    whole = scheduler.run_batch([[5, 6]], **greedy, ignore_eos=True)[0]
    early = scheduler.run_batch([[5, 6]], **greedy, stop_ids=[whole[1]])[0]
    assert early == whole[:2] if whole[0] != whole[1] else whole[:1]
    held = scheduler.run_batch([[5, 6]], **greedy, stop_ids=[whole[1]], min_tokens=6)[0]
    assert len(held) >= 6
    assert whole[1] not in held[:6]
    repeated = scheduler.run_batch([[5, 6]], **greedy, frequency_penalty=100.0, rep_window=64, ignore_eos=True)[0]
    assert len(set(repeated)) == len(repeated)  # no token twice
    assert not {5, 6} & set(repeated)


def test_what_is_not_offered_is_refused(model: LoadedModel) -> None:
    def make(**options: Any) -> InferenceScheduler:
        return InferenceScheduler(model.module(), model.tokenizer, **options)

    with pytest.raises(ConfigError, match="dtype = 'int8' is not offered; offered: float32, bfloat16, float16"):
        make(dtype="int8")
    with pytest.raises(ConfigError, match=r"device = 'cuda:7' is not here; here: cpu:0"):
        make(device="cuda:7")
    with pytest.raises(ConfigError, match="cache = 'paged' is not offered"):
        make(cache="paged")
    with pytest.raises(ConfigError, match="max_batch_size is 0"):
        make(max_batch_size=0)
