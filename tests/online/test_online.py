from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from upweight.inference import InferenceScheduler
from upweight.models.decoder import Decoder
from upweight.online import BaseRewardModel, RawRollout, RolloutGenerator, RolloutResult, RolloutRunner
from upweight.weights.loading import LoadedModel


class EvenShare(BaseRewardModel):
    """Share of even ids; remembers what it was given."""

    def __init__(self) -> None:
        self.calls = 0

    def score(self, prompts: list[str], responses: list[list[str]], *, token_ids: Any, metadata: Any) -> Any:
        self.calls += 1
        self.metadata = metadata
        return [[float(np.mean([i % 2 == 0 for i in ids])) if ids else 9.0 for ids in row] for row in token_ids]


def test_shapes_padding_and_logprobs_agree_with_a_full_forward_pass(
    model: LoadedModel, generator: RolloutGenerator
) -> None:
    rollout = generator.generate({"input_ids": [[5, 6, 7], [8, 9, 10, 11, 12]]})
    assert rollout.prompts.tolist() == [[2, 2, 5, 6, 7], [8, 9, 10, 11, 12]]  # padded on the left with the pad id
    assert rollout.prompt_mask is not None
    assert rollout.prompt_mask.tolist() == [[False, False, True, True, True], [True] * 5]
    assert rollout.responses.shape == rollout.logprobs_old.shape == (2, 3, 5)
    assert rollout.response_mask.all()
    module: Decoder = model.module()
    for b, prompt in enumerate([[5, 6, 7], [8, 9, 10, 11, 12]]):
        for g in range(3):
            ids = prompt + rollout.responses[b, g].tolist()
            logits = np.asarray(module(jnp.asarray([ids + [0] * (16 - len(ids))])), np.float64)[0]
            logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
            expected = [logp[t - 1, ids[t]] for t in range(len(prompt), len(ids))]
            np.testing.assert_allclose(rollout.logprobs_old[b, g], expected, atol=1e-5)
    np.testing.assert_array_equal(rollout.logprobs_old, rollout.logprobs_raw)
    assert rollout.finish_reasons == [["length"] * 3] * 2
    assert rollout.weights_version is not None
    assert rollout.weights_version.tolist() == [[0] * 3] * 2
    assert rollout.token_versions is None


def test_results_are_kept_for_their_own_batch_and_for_the_interval(generator: RolloutGenerator) -> None:
    reward = EvenShare()
    runner = RolloutRunner(generator, reward, rollout_interval=3)
    one, other = {"input_ids": [[5, 6, 7]], "metadata": [{"answer": 3}]}, {"input_ids": [[5, 6, 8]]}
    first, fresh = runner(one)
    assert fresh
    assert reward.metadata == [{"answer": 3}]
    assert isinstance(first, RolloutResult)
    assert runner({"input_ids": np.array([[5, 6, 7]]), "metadata": [{"answer": 3}]}) == (first, False)
    _, fresh = runner(other)
    assert fresh
    runner.step()
    runner.step()
    assert runner(one) == (first, False)
    runner.step()
    again, fresh = runner(one)
    assert fresh
    assert again is not first
    runner.clear_cache()
    assert runner(one)[1]
    assert reward.calls == 4


def test_unanswered_rows_stay_out(generator: RolloutGenerator) -> None:
    result, _ = RolloutRunner(generator, EvenShare())({"input_ids": [[5] * 600, [5, 6]]})
    assert result.valid is not None
    assert result.valid.tolist() == [[False] * 3, [True] * 3]
    assert result.rewards[0].tolist() == [0.0, 0.0, 0.0]
    assert result.finish_reasons[0] == ["rejected"] * 3
    assert result.response_texts[0] == ["", "", ""]
    with pytest.raises(RuntimeError, match="no prompt of the batch was answered"):
        generator.generate({"input_ids": [[5] * 600]})


def test_rewards_are_checked_and_may_be_awaited(generator: RolloutGenerator) -> None:
    class Fixed(BaseRewardModel):
        def __init__(self, value: Any) -> None:
            self.value = value

        async def score(self, prompts: list[str], responses: list[list[str]]) -> Any:  # type: ignore[override]
            return self.value

    batch = {"input_ids": [[5, 6]]}
    result, _ = RolloutRunner(generator, Fixed([[1, 0, 2]]))(batch)
    assert result.rewards.dtype == jnp.float32
    assert result.rewards.tolist() == [[1.0, 0.0, 2.0]]
    with pytest.raises(ValueError, match=r"shape \(3,\); expected \[B, G\] = \(1, 3\)"):
        RolloutRunner(generator, Fixed([1, 0, 2]))(batch)
    with pytest.raises(ValueError, match="returned nan for prompt 0, response 1"):
        RolloutRunner(generator, Fixed([[1, float("nan"), 2]]))(batch)


def test_seeded_generators_repeat_and_their_calls_differ(model: LoadedModel, scheduler: InferenceScheduler) -> None:
    def make() -> RolloutGenerator:
        return RolloutGenerator(scheduler, model.tokenizer, max_tokens=5, group_size=2, seed=7, ignore_eos=True)

    batch = {"input_ids": [[5, 6, 7]]}
    one, two = make(), make()
    first, second = one.generate(batch), one.generate(batch)
    assert first.responses.tolist() == two.generate(batch).responses.tolist()
    assert first.responses.tolist() != second.responses.tolist()
    assert first.responses[0, 0].tolist() != first.responses[0, 1].tolist()
    assert isinstance(first, RawRollout)


def test_stop_rules_reach_the_engine(model: LoadedModel, scheduler: InferenceScheduler) -> None:
    def roll(**options: Any) -> RawRollout:
        made = RolloutGenerator(scheduler, model.tokenizer, group_size=2, seed=3, **{"max_tokens": 8, **options})
        return made.generate({"input_ids": [[5, 6, 7]]})

    whole = roll(ignore_eos=True)
    ids, text = whole.responses[0, 0].tolist(), whole.response_texts[0][0]
    by_id = roll(ignore_eos=True, stop_ids=[ids[2]])
    assert by_id.responses[0, 0, :3].tolist() == ids[:3]  # the stop token stays in ids, mask and log-probs
    assert by_id.response_mask[0, 0].sum() == 3
    assert by_id.logprobs_old[0, 0, :3].tolist() == whole.logprobs_old[0, 0, :3].tolist()
    assert by_id.finish_reasons[0][0] == "stop"
    assert by_id.response_texts[0][0] == model.tokenizer.decode(ids[:2])
    needle = text[3:6]
    by_text = roll(ignore_eos=True, stop=needle)  # one string, not its characters
    assert by_text.response_texts[0][0] == text[: text.index(needle)]
    late = roll(ignore_eos=True, stop_ids=[ids[2]], min_tokens=5)
    assert ids[2] not in late.responses[0, 0, :5].tolist()
    assert late.transform is not None
    assert late.transform.not_recomputable == {"min_tokens": 5}
