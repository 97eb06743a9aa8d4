"""Conversations of many turns, with tools or an environment, as samples whose token ids are exactly what was sampled.

Invariants
1. Sampled ids are never encoded again: each prompt is the ids before it, the sampled ids, and a bridge (`turn_bridge`).
2. Only sampled tokens have mask 1, with the log-probabilities they were sampled at; all else has mask 0 and 0.0.
3. Between two answers of a sample there is at least one context token, so that each answer can be told apart.
4. Where no bridge exists (or the template's own history is wanted and differs) a new sample starts with a fresh render;
   `forks` counts it. Its trained tokens are those sampled from then on.
5. All answers are sampled with the same settings.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import uuid
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from upweight.rollout.context import RolloutContext
from upweight.rollout.models import Sample
from upweight.rollout.turn_bridge import Message, Render, Rendered, TurnBridge

if TYPE_CHECKING:
    from openai import AsyncOpenAI
    from openai.types import Completion

logger = logging.getLogger(__name__)

TOKEN_PREFIX = "token_id:"
KEPT_BRIDGES = 64
MOST_SAID = 8


@dataclass(frozen=True)
class Answer:
    """One sampled turn: `token_ids` and `logprobs` with the stop token, if one was sampled; `text` without it."""

    text: str
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    inference_versions: list[int] = field(default_factory=list)  # one a token; empty if the server does not tell


@dataclass
class Segment:
    """Tokens that became one sample."""

    token_ids: list[int]
    logprobs: list[float]
    mask: list[int]
    versions: list[int] = field(default_factory=list)
    turns: int = 0

    @classmethod
    def of_context(cls, token_ids: list[int]) -> Segment:
        return cls(list(token_ids), [0.0] * len(token_ids), [0] * len(token_ids))

    def add_context(self, token_ids: Sequence[int]) -> None:
        self.token_ids.extend(token_ids)
        self.logprobs.extend([0.0] * len(token_ids))
        self.mask.extend([0] * len(token_ids))

    def add_answer(self, answer: Answer) -> None:
        self.token_ids.extend(answer.token_ids)
        self.logprobs.extend(answer.logprobs)
        self.mask.extend([1] * len(answer.token_ids))
        self.versions.extend(answer.inference_versions)
        self.turns += 1

    def cut(self, length: int) -> None:
        """Takes back the context behind the first `length` tokens."""
        for each in (self.token_ids, self.logprobs, self.mask):
            del each[length:]

    @property
    def n_trained(self) -> int:
        return sum(self.mask)


class Conversation:
    """Messages and answers of one rollout. Not thread-safe; many may run at once.

    `ask()` samples the next answer, `add(...)` appends what the user, a tool or the environment says to it.

    Args:
        messages: up to the first answer.
        tools: handed to the chat template.
        history: "verbatim" keeps sampled ids whatever the template would do to them. "template" renders the whole history
            each turn, as a chat server does, and forks where that differs; it costs the whole history each time.
        end_ids: token ids that end an answer beside the one that the template writes.
        render: in place of the server's render route.
        sampling: request fields of `/completions`: max_tokens, temperature, stop, …
    """

    def __init__(
        self,
        context: RolloutContext,
        messages: Sequence[Message],
        *,
        tools: Sequence[Message] | None = None,
        history: Literal["verbatim", "template"] = "verbatim",
        end_ids: Sequence[int] = (),
        render: Render | None = None,
        **sampling: Any,
    ) -> None:
        if history not in ("verbatim", "template"):
            raise ValueError(f"history is {history!r}; it must be 'verbatim' or 'template'")
        self._context = context
        self._bridge = _bridges_of(context).get(render, tools, context)
        self._history = history
        self._end_ids = frozenset(end_ids)
        self._sampling = sampling
        self._messages: list[Message] = list(messages)
        self._new: list[Message] = []  # since the last answer
        self._before: tuple[int, int] | None = None  # segments and tokens of the last one, before the prompt was made
        self._last: Answer | None = None
        self._segments: list[Segment] = []

    # -- what happens in it

    @property
    def messages(self) -> list[Message]:
        """All messages so far, answers as they read."""
        return list(self._messages)

    @property
    def forks(self) -> int:
        """How often a new sample had to be started."""
        return max(0, len(self._segments) - 1)

    def add(self, *messages: Message) -> None:
        """Append messages of the user, a tool or the environment; they are rendered by the next `ask`.

        A prompt that was made already, for an `ask` that failed or by `prompt_ids`, is made again.
        """
        if messages:
            self._take_back_prompt()
        self._new.extend(messages)
        self._messages.extend(messages)

    def ask(self) -> Answer:
        """Sample the next answer.

        Raises:
            ValueError: nothing was added since the last answer.
        """
        self._prepare()
        completion = self._context.openai_client.completions.create(**self._request())
        return self.take(answer_of(completion))

    async def ask_async(self, client: AsyncOpenAI) -> Answer:
        """As `ask`, with a client of `context.async_openai_client()`."""
        await asyncio.to_thread(self._prepare)
        completion = await client.completions.create(**self._request())
        return self.take(answer_of(completion))

    @property
    def prompt_ids(self) -> list[int]:
        """The exact prompt of the next answer, for those who sample elsewhere and hand the answer to `take`."""
        self._prepare()
        return list(self._segments[-1].token_ids)

    def take(self, answer: Answer) -> Answer:
        """Append an answer that was sampled after `prompt_ids`."""
        if len(answer.token_ids) != len(answer.logprobs) or not answer.token_ids:
            raise ValueError(
                f"An answer needs as many logprobs as token_ids, at least one; "
                f"it has {len(answer.logprobs)} and {len(answer.token_ids)}"
            )
        self._segments[-1].add_answer(answer)
        self._messages.append({"role": "assistant", "content": answer.text})
        self._last, self._new, self._before = answer, [], None
        return answer

    def describe_answer(self, message: Message) -> None:
        """How the last answer reads as a message, for instance with its `tool_calls` parsed.

        It is shown to the template where everything is rendered anew; the sampled ids stay what they are.

        Raises:
            ValueError: there is no answer, or something was added after it.
        """
        if self._last is None or self._new:
            raise ValueError("describe_answer must follow an answer at once, before anything is added")
        self._messages[-1] = message

    # -- what comes out of it

    def sample(self, normalized_reward: float, /, **debug_info: Any) -> Sample:
        """The conversation as one sample; after forks, the part with the most sampled tokens (of equal ones the last).

        What the other parts sampled is not trained; `debug_info["left_out_tokens"]` tells how much that is.
        """
        parts = self._parts()
        best = max(reversed(parts), key=lambda part: part.n_trained)
        left_out = sum(part.n_trained for part in parts) - best.n_trained
        return self._to_sample(best, normalized_reward, {**debug_info, "left_out_tokens": left_out})

    def samples(self, normalized_reward: float, /, **debug_info: Any) -> list[Sample]:
        """Every part as a sample, one more than there were forks; `debug_info["conversation"]` is the same in all."""
        name = uuid.uuid4().hex
        return [
            self._to_sample(part, normalized_reward, {**debug_info, "conversation": name}) for part in self._parts()
        ]

    def _parts(self) -> list[Segment]:
        parts = [segment for segment in self._segments if segment.turns]
        if not parts:
            raise ValueError("Nothing was sampled yet: call ask() first")
        return parts

    def _to_sample(self, segment: Segment, reward: float, debug_info: dict[str, Any]) -> Sample:
        end = len(segment.mask) - segment.mask[::-1].index(1)  # what follows the last answer teaches nothing
        info = {"turns": segment.turns, "forks": self.forks, **debug_info}
        if segment.versions:
            info["inference_version"] = min(segment.versions)
        if len(set(segment.versions)) > 1:
            info["token_inference_versions"] = list(segment.versions)
        return Sample(
            token_ids=segment.token_ids[:end],
            logprobs=segment.logprobs[:end],
            mask=segment.mask[:end],
            normalized_reward=reward,
            debug_info=info,
        )

    # -- prompts

    def _prepare(self) -> None:
        """Bring the last segment up to the next answer."""
        if self._before is not None:
            return
        before = len(self._segments), len(self._segments[-1].token_ids) if self._segments else 0
        if not self._segments:
            self._say_what_is_rewritten()
            self._segments.append(Segment.of_context(self._bridge.whole(self._messages)))
        elif not self._new:
            raise ValueError("Nothing was added since the last answer: call add(...) before ask()")
        elif bridge := self._bridge_ids(self._new):
            self._segments[-1].add_context(bridge)
        else:
            self._extend_or_fork(self._bridge.whole(self._messages))
        self._before = before

    def _take_back_prompt(self) -> None:
        if self._before is None:
            return
        segments, tokens = self._before
        del self._segments[segments:]
        if self._segments:
            self._segments[-1].cut(tokens)
        self._before = None

    def _bridge_ids(self, new: Sequence[Message]) -> Sequence[int] | None:
        """Ids between the last answer and the next; None or none where all must be rendered."""
        if self._history == "template":
            return None
        ids = self._bridge.between(new)
        assert self._last is not None
        last = self._last.token_ids[-1]
        has_ended = self._last.finish_reason != "length" and ids and (last == ids[0] or last in self._end_ids)
        return ids[1:] if has_ended and ids else ids

    def _extend_or_fork(self, whole: list[int]) -> None:
        before = self._segments[-1].token_ids
        if len(whole) > len(before) and whole[: len(before)] == before:
            self._segments[-1].add_context(whole[len(before) :])
        else:
            self._segments.append(Segment.of_context(whole))
            logger.info("A conversation was forked before message %d", len(self._messages))

    def _say_what_is_rewritten(self) -> None:
        if self._history == "template" or not (rewrites := self._bridge.rewrites):
            return
        if _bridges_of(self._context).is_news(rewrites):
            logger.warning(
                "The chat template of %s %s. Samples keep what was sampled, so later turns are trained after a history "
                "that a chat server would show differently; history='template' follows the template and forks instead.",
                self._context.config.model_name,
                "; it ".join(rewrites),
            )

    def _request(self) -> dict[str, Any]:
        return {
            "model": self._context.config.model_name,
            "prompt": self._segments[-1].token_ids,
            "logprobs": 1,
            **self._sampling,
            "extra_body": {"return_token_ids": True, **self._sampling.get("extra_body", {})},
        }


def answer_of(completion: Completion) -> Answer:
    """First choice of a text completion.

    Raises:
        ValueError: it has no token ids or log-probabilities, or not for every token.
    """
    choice = completion.choices[0]
    told = choice.logprobs
    if told is None or not told.tokens or told.token_logprobs is None:
        raise ValueError("The completion has no logprobs: the server must honour logprobs=1")
    if not all(token.startswith(TOKEN_PREFIX) for token in told.tokens):
        raise ValueError(
            f"Token {told.tokens[0]!r} is not of the form '{TOKEN_PREFIX}N': the server must honour return_token_ids"
        )
    token_ids = [int(token.removeprefix(TOKEN_PREFIX)) for token in told.tokens]
    if None in told.token_logprobs:
        at = told.token_logprobs.index(None)  # type: ignore[arg-type]
        raise ValueError(
            f"The completion tells no log-prob of its token {at}, {told.tokens[at]!r}: it cannot be trained on"
        )
    versions = (choice.model_extra or {}).get("token_inference_versions")
    if versions is None:
        version = (completion.model_extra or {}).get("inference_version")
        versions = [version] * len(token_ids) if isinstance(version, int) else []
    return Answer(
        text=choice.text,
        token_ids=token_ids,
        logprobs=[float(value) for value in told.token_logprobs],
        finish_reason=choice.finish_reason,
        inference_versions=versions,
    )


class ServerRender:
    """The job's render route."""

    def __init__(self, context: RolloutContext) -> None:
        self._jobs = context.api_client.v1alpha1.fine_tuning.jobs
        self._job_id = context.config.job_id

    def __call__(
        self, messages: Sequence[Message], *, tools: Sequence[Message] | None, add_generation_prompt: bool
    ) -> Rendered:
        answer = self._jobs.render(
            job_id=self._job_id, messages=messages, tools=tools, add_generation_prompt=add_generation_prompt
        )
        return Rendered(answer["token_ids"], answer["text"])


class _Bridges:
    """The bridges of a context, since examining a template costs some renders: those used last, as tasks may each have tools of their own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bridges: OrderedDict[tuple[int, str], TurnBridge] = OrderedDict()
        self._said: set[tuple[str, ...]] = set()

    def get(self, render: Render | None, tools: Sequence[Message] | None, context: RolloutContext) -> TurnBridge:
        key = id(render), repr(tools)  # a bridge keeps its render, so that no other gets its id meanwhile
        with self._lock:
            bridge = self._bridges.setdefault(key, TurnBridge(render or ServerRender(context), tools))
            self._bridges.move_to_end(key)
            if len(self._bridges) > KEPT_BRIDGES:
                self._bridges.popitem(last=False)
            return bridge

    def is_news(self, rewrites: Sequence[str]) -> bool:
        """Whether this was not said before; after some different ones nothing is news."""
        with self._lock:
            before = len(self._said)
            if before < MOST_SAID:
                self._said.add(tuple(rewrites))
            return len(self._said) > before


def _bridges_of(context: RolloutContext) -> _Bridges:
    bridges: _Bridges = context.shared.setdefault("bridges", _Bridges())
    return bridges
