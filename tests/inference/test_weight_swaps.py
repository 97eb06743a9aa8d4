"""The four things that running rows may do when the weights change, and what becomes of known prefixes."""

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import pytest

from upweight.errors import ConfigError
from upweight.inference.engine import Engine
from upweight.inference.gather import answers_to
from upweight.inference.types import FinishReason, GenerationOutput, SamplingParams
from upweight.models.layers import Params
from upweight.weights.loading import LoadedModel

PROMPT = list(range(20, 45))
LONG = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)


def changed(model: LoadedModel) -> Params:
    return dict(model.params, embed=jnp.flip(model.params["embed"], axis=1))


class Running:
    """A request that has begun, on an engine of its own."""

    def __init__(self, model: LoadedModel, **options: Any) -> None:
        self.engine = Engine(model.config, model.params, model.tokenizer, max_rows=2, **options).start()
        self.outputs: list[GenerationOutput] = []
        self.ended, began, self.hold = threading.Event(), threading.Event(), threading.Event()

        def wait_once(_: object) -> None:
            if not began.is_set():
                began.set()
                self.hold.wait(60)  # the engine stands here until the swap is asked for

        self.engine.submit(PROMPT, LONG, self._end, on_text=wait_once)
        assert began.wait(60)

    def _end(self, output: GenerationOutput) -> None:
        self.outputs.append(output)
        self.ended.set()

    def swap(self, params: Params, version: int, meanwhile: Callable[[], object] = lambda: None) -> GenerationOutput:
        """The output of the request that lived when the swap was asked for; `meanwhile` is called before it goes on."""
        swapping = threading.Thread(target=self.engine.set_weights, args=(params, version))
        swapping.start()
        while not self.engine._orders:  # the engine stands still: what is ordered stays there
            time.sleep(0.001)
        meanwhile()
        self.hold.set()
        swapping.join(60)
        assert not swapping.is_alive()
        assert self.ended.wait(60)
        return self.outputs[0]


def greedy_after(model: LoadedModel, params: Params, tokens: list[int], count: int) -> GenerationOutput:
    cold = Engine(model.config, params, model.tokenizer, max_rows=2).start()
    output = answers_to(cold, [tokens], SamplingParams(max_tokens=count, temperature=0, ignore_eos=True))[0]
    cold.stop()
    return output


def test_recompute_goes_on_as_if_the_new_weights_had_read_everything(model: LoadedModel) -> None:
    run = Running(model, on_update="recompute")
    new = changed(model)
    output = run.swap(new, 1)
    old = output.token_versions.count(0)
    assert 0 < old < 60
    assert output.token_versions == [0] * old + [1] * (60 - old)
    expected = greedy_after(model, new, PROMPT + output.token_ids[:old], 60 - old)
    assert output.token_ids[old:] == expected.token_ids
    assert output.logprobs[old:] == pytest.approx(expected.logprobs, abs=2e-5)
    run.engine.stop()


def test_continue_goes_on_over_old_keys(model: LoadedModel) -> None:
    run = Running(model)
    output = run.swap(changed(model), 1)
    old = output.token_versions.count(0)
    assert 0 < old < 60
    expected = greedy_after(model, changed(model), PROMPT + output.token_ids[:old], 60 - old)
    assert output.logprobs[old:] != pytest.approx(expected.logprobs, abs=2e-5)
    run.engine.stop()


def test_drain_lets_rows_finish_and_admits_nothing_meanwhile(model: LoadedModel) -> None:
    run = Running(model, on_update="drain")
    late: list[GenerationOutput] = []
    done = threading.Event()

    def end(output: GenerationOutput) -> None:
        late.append(output)
        done.set()

    run.swap(
        changed(model),
        1,
        meanwhile=lambda: run.engine.submit([1, 2, 3], SamplingParams(max_tokens=3, ignore_eos=True), end),
    )
    assert done.wait(60)
    assert run.outputs[0].token_versions == [0] * 60
    assert late[0].token_versions == [1] * 3
    run.engine.stop()


def test_abort_ends_what_runs(model: LoadedModel) -> None:
    run = Running(model, on_update="abort")
    output = run.swap(changed(model), 1)
    assert output.finish_reason is FinishReason.ABORTED
    assert output.error == "the weights changed to version 1"
    assert set(output.token_versions) == {0}
    assert run.engine.version == 1
    run.engine.stop()


def test_abort_ends_rows_that_were_preempted_too(model: LoadedModel) -> None:
    run = Running(model, on_update="abort")

    def preempt() -> None:  # the engine stands still meanwhile
        run.engine.scheduler._preempt(run.engine.scheduler.running[0])

    output = run.swap(changed(model), 1, meanwhile=preempt)
    assert output.finish_reason is FinishReason.ABORTED
    run.engine.stop()


@pytest.mark.parametrize(("policy", "cached", "version"), [("version", 0, None), ("flush", 0, None), ("keep", 24, 0)])
def test_known_prefixes_across_a_swap(
    model: LoadedModel, caplog: pytest.LogCaptureFixture, policy: Any, cached: int, version: int | None
) -> None:
    with caplog.at_level(logging.WARNING):
        engine = Engine(model.config, model.params, model.tokenizer, max_rows=2, cache_on_update=policy).start()
    assert ("old keys and values" in caplog.text) == (policy == "keep")
    few = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
    answers_to(engine, [PROMPT], few)
    engine.set_weights(changed(model), 1)
    output = answers_to(engine, [PROMPT], few)[0]
    assert (output.cached_tokens, output.cached_version) == (cached, version)
    assert output.weights_version == 1
    again = answers_to(engine, [PROMPT], few)[0]
    assert again.cached_tokens == 24
    assert engine.stats()["tokens_by_version"] == {0: 2, 1: 4}
    assert 0 < engine.stats()["prefix_hit_rate"] < 1
    engine.stop()


def test_unknown_policies_are_named(model: LoadedModel) -> None:
    with pytest.raises(ConfigError, match="on_update is 'later'; it must be one of continue, recompute, drain, abort"):
        Engine(model.config, model.params, model.tokenizer, on_update="later")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="cache_on_update is 'no'"):
        Engine(model.config, model.params, model.tokenizer, cache_on_update="no")  # type: ignore[arg-type]
