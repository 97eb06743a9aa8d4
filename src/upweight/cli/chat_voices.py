"""Who answers in `upweight chat`: a job's endpoint, or a model loaded into this process.

A voice gives an answer piece by piece and keeps what it says about it in `Answer`.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import re
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from upweight.cli.checks import home
from upweight.errors import EngineError, ServerError

if TYPE_CHECKING:
    import httpx

    from upweight.api_client import TokenFactory
    from upweight.inference.engine import Engine
    from upweight.inference.types import GenerationOutput

Message = dict[str, str]

ANSWER_TIMEOUT_S = 900.0
WAIT_S = 1.0
_JOB_ID = re.compile(r"ftjob-[0-9a-f]+\Z")
_MODEL_ID = re.compile(r"ftmodel-[0-9a-f]+\Z")


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How answers are drawn."""

    temperature: float
    max_tokens: int
    seed: int | None = None


@dataclass(kw_only=True)
class Answer:
    """What became of one answer."""

    text: str = ""
    finish_reason: str = ""
    version: int | None = None  # of the weights at the first token; None for saved weights
    tokens: int = 0
    seconds: float = 0.0


class Voice(Protocol):
    name: str

    def say(self, messages: Sequence[Message], sampling: Sampling, answer: Answer) -> Iterator[str]:
        """Pieces of the answer as they come; `answer` is complete after the last one."""
        ...


@contextmanager
def open_voice(target: str, url: str | None, key: str | None) -> Iterator[Voice]:
    """A job's or promoted model's id (or any target when --url names a server) speaks through its server, all else is loaded here."""
    if _MODEL_ID.match(target) and not Path(target).exists():
        from upweight.cli.connection import session

        with session(url, key) as (client, _):
            yield JobVoice(
                client, target, f"{client.v1.fine_tuning.jobs.bare_endpoint().partition('/v1/')[0]}/v1/chat/completions"
            )
    elif (_JOB_ID.match(target) and not Path(target).exists()) or url:
        from upweight.cli.connection import session

        with session(url, key) as (client, _):
            _wait_until_served(client, target)
            yield JobVoice(client, target)
    else:
        with _loaded(target) as voice:
            yield voice


def tell(text: str) -> None:
    """To standard error: standard output is the answer's."""
    print(text, file=sys.stderr, flush=True)


class JobVoice:
    """Answers of a job's present weights over HTTP, as server-sent events."""

    def __init__(self, client: TokenFactory, name: str, url: str | None = None) -> None:
        """`name`: a job's id; with `url`, which serves several, a model's."""
        self.name = name
        self._client = client
        of_job = f"{client.v1alpha1.fine_tuning.jobs.endpoint(job_id=name)}/inference/openai/v1/chat/completions"
        self._url = url or of_job

    def say(self, messages: Sequence[Message], sampling: Sampling, answer: Answer) -> Iterator[str]:
        began = time.monotonic()
        body = {"model": self.name, "messages": list(messages), "stream": True}
        body |= {name: value for name, value in asdict(sampling).items() if value is not None}
        headers = {"Authorization": f"Bearer {self._client.api_key}"}
        http = self._client.httpx_client
        with http.stream("POST", self._url, json=body, headers=headers, timeout=ANSWER_TIMEOUT_S) as response:
            _raise_for_status(response)
            for event in _events(response.iter_lines()):
                piece = _take(event, answer)
                if piece:
                    yield piece
        answer.seconds = time.monotonic() - began


def _raise_for_status(response: httpx.Response) -> None:
    from upweight.api_client._responses import raise_for_status

    if not response.is_success:
        response.read()
        raise_for_status(response)


def _events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        if line.startswith("data:"):
            yield json.loads(data)
    raise ServerError("the answer broke off before its end: the server or its worker stopped; try again")


def _take(event: dict[str, Any], answer: Answer) -> str:
    """Adds one event to `answer`; returns its text."""
    if "error" in event:
        raise ServerError(f"the answer broke off: {event['error'].get('message', event['error'])}")
    if event.get("inference_version") is not None:
        answer.version = event["inference_version"]
    piece = ""
    for choice in event.get("choices") or []:
        piece += choice.get("delta", {}).get("content") or ""
        answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
        answer.tokens += len(choice.get("token_ids") or ())
    answer.text += piece
    return piece


def _wait_until_served(client: TokenFactory, job_id: str) -> None:
    """Tells what the job waits for until it serves its first version; it may be queued behind others for hours."""
    from upweight.cli.job_calls import get_progress
    from upweight.cli.job_screens import OVER

    told = ""
    while (progress := get_progress(client, job_id, since=2**31 - 1))["inference_version"] is None:
        if progress["job_status"] in OVER:
            raise ServerError(f"job {job_id} {progress['job_status']} before it served a version")
        text = f"loading… job {job_id} is {progress['job_status']}: {progress['reason'] or 'no reason given'}"
        if text != told:
            tell(text)
        told = text
        time.sleep(WAIT_S)
    if not told and progress["worker"] is None:
        tell(f"loading… the server starts a worker for {job_id}")


class ModelVoice:
    """Answers of an engine in this process."""

    def __init__(self, name: str, engine: Engine) -> None:
        self.name = name
        self._engine = engine

    def say(self, messages: Sequence[Message], sampling: Sampling, answer: Answer) -> Iterator[str]:
        from upweight.inference.types import SamplingParams

        began = time.monotonic()
        pieces: queue.SimpleQueue[str | GenerationOutput] = queue.SimpleQueue()
        prompt = self._engine.tokenizer.encode_chat(messages)
        request = self._engine.submit(
            prompt, SamplingParams(**asdict(sampling)), pieces.put, on_text=lambda piece: pieces.put(piece.text)
        )
        try:
            while isinstance(item := pieces.get(), str):
                yield item
        finally:
            self._engine.cancel(request)  # without effect once it is answered
        _complete(answer, item, time.monotonic() - began)


def _complete(answer: Answer, output: GenerationOutput, seconds: float) -> None:
    if output.error:
        raise EngineError(output.error)
    answer.text, answer.finish_reason = output.text, str(output.finish_reason)
    answer.tokens, answer.seconds = len(output.token_ids), seconds


@contextmanager
def _loaded(target: str) -> Iterator[ModelVoice]:
    from upweight.weights.source import resolve

    source = resolve(target)  # before the slow imports: a wrong name is told at once
    tell(f"loading… {source.name}")
    _quiet()

    from upweight.inference.engine import Engine
    from upweight.weights.loading import load_model

    _keep_compiled()
    model = load_model(source)
    engine = Engine(model.config, model.params, model.tokenizer, max_rows=1).start()
    try:
        yield ModelVoice(source.name, engine)
    except KeyboardInterrupt:
        # The engine's thread may be compiling and cannot be joined in bounded time.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(130)
    finally:
        engine.stop()


def _quiet() -> None:
    """Libraries keep their notes to themselves, and a job on the same accelerator keeps its memory."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    logging.getLogger("jax").setLevel(logging.ERROR)


def _keep_compiled() -> None:
    """Programs are compiled once per home folder, as in the server's workers; without a writable one, each time."""
    folder = home().absolute() / "cache" / "compiled"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        tell(f"{folder}: {error.strerror}; compiled programs are not kept")
        return
    from upweight.inference.compilation_cache import use_compilation_cache

    use_compilation_cache(folder)
