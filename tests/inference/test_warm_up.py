"""After a warm-up nothing is compiled, whatever is asked for; and an engine for one row decodes one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import jax
import pytest

from upweight.errors import ConfigError, EngineError
from upweight.inference.engine import Engine
from upweight.inference.gather import answers_to
from upweight.inference.types import SamplingParams
from upweight.weights.loading import LoadedModel

CONTEXT = 96
BASE = SamplingParams(max_tokens=6, ignore_eos=True)


class NoMask:
    """A constraint under which every second token may come."""

    def allowed(self) -> bytes:
        return b"\x55" * 4096

    def accept(self, token_id: int) -> None:
        pass


ASKED = [
    BASE,
    replace(BASE, max_tokens=30),
    replace(BASE, temperature=0.0),
    replace(BASE, top_p=0.8, top_k=20),
    replace(BASE, top_logprobs=5),
    replace(BASE, logit_bias=((7, 3.0),), frequency_penalty=0.5),
    replace(BASE, min_tokens=3, top_logprobs=2, min_p=0.1),
    replace(BASE, constraint=NoMask),
]


class Compilations:
    """Counts what XLA compiles or fetches from the cache."""

    def __init__(self) -> None:
        self.count = 0

    def heard(self, event: str, duration: float, **_: object) -> None:
        self.count += event == "/jax/core/compile/backend_compile_duration"


@pytest.fixture
def compilations() -> Iterator[Compilations]:
    found = Compilations()
    jax.monitoring.register_event_duration_secs_listener(found.heard)
    yield found
    jax.monitoring.unregister_event_duration_listener(found.heard)


def test_nothing_is_compiled_after_a_warm_up(model: LoadedModel, compilations: Compilations) -> None:
    engine = Engine(model.config, model.params, model.tokenizer, max_rows=2)
    ready = engine.warm_up(CONTEXT)
    assert compilations.count > 0
    assert ready.programs == engine.stats()["programs"]
    assert ready.seconds > 0
    compilations.count = 0
    with engine:
        for length in (1, 5, 17, 60, 66, CONTEXT - 31):
            prompts = [[10 + at + i for i in range(length)] for at in range(len(ASKED))]
            answers_to(engine, prompts, ASKED)
            answers_to(engine, [prompts[0]] * 5, BASE)  # a group
        for one in ASKED:
            answers_to(engine, [[3, 4, 5]], one)  # alone
        assert engine.stats()["programs"] == ready.programs
        assert compilations.count == 0
        with pytest.raises(EngineError, match="before start"):
            engine.warm_up(CONTEXT)
    for context in (0, -5, 2.5):
        with pytest.raises(ConfigError, match=f"context is {context}; it must be a whole number of at least 1"):
            Engine(model.config, model.params, model.tokenizer).warm_up(context)  # type: ignore[arg-type]
    with pytest.raises(EngineError, match="before start"):
        engine.warm_up(CONTEXT)  # nor after the end


def test_answers_after_a_warm_up_are_those_of_a_cold_engine(model: LoadedModel) -> None:
    asked = [replace(one, seed=at) for at, one in enumerate(ASKED)]
    found = []
    for warm in (False, True):
        engine = Engine(model.config, model.params, model.tokenizer, max_rows=4)
        if warm:
            engine.warm_up(CONTEXT)
        with engine:
            found.append([(o.token_ids, o.logprobs) for o in answers_to(engine, [[3, 4, 5]] * len(asked), asked)])
    assert found[0] == found[1]


def test_an_engine_for_one_row_decodes_one_row(model: LoadedModel) -> None:
    """The products of a single row are faster; there are no others that its bits could depend on."""
    engine = Engine(model.config, model.params, model.tokenizer, max_rows=1)
    assert engine.runner.row_sizes == [1]
    greedy = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    with engine:
        alone = answers_to(engine, [[5, 6, 7], [8, 9]], greedy)
    with Engine(model.config, model.params, model.tokenizer, max_rows=4) as several:
        others = answers_to(several, [[5, 6, 7], [8, 9]], greedy)
    for one, other in zip(alone, others, strict=True):
        assert one.token_ids == other.token_ids
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
