"""The OpenAI-compatible inference routes of a job.

The `openai` package is imported on use: it is slow to load and only these calls need its types.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import httpx
from pydantic import BaseModel

from upweight.api_client._responses import parse
from upweight.api_client.resources._base import JobResource

if TYPE_CHECKING:
    from openai.types import Completion
    from openai.types.chat import ChatCompletion

INFERENCE_TIMEOUT_S = 600.0

Model = TypeVar("Model", bound=BaseModel)


class _Creating(JobResource):
    def _create(self, model: type[Model], job_id: str, body: dict[str, Any]) -> Model:
        timeout = body.pop("timeout", INFERENCE_TIMEOUT_S)
        response: httpx.Response = self._client.post(self.endpoint(job_id=job_id), json=body, timeout=timeout)
        return parse(model, response)


class ChatCompletions(_Creating):
    PATH_SEGMENT = "completions"

    def create(self, *, job_id: str, **kw: Any) -> ChatCompletion:
        """POST chat/completions; keywords are the body, but `timeout` (seconds)."""
        from openai.types.chat import ChatCompletion

        return self._create(ChatCompletion, job_id, kw)


class Completions(_Creating):
    PATH_SEGMENT = "completions"

    def create(self, *, job_id: str, **kw: Any) -> Completion:
        """POST completions; keywords are the body, but `timeout` (seconds)."""
        from openai.types import Completion

        return self._create(Completion, job_id, kw)


class Chat(JobResource):
    PATH_SEGMENT = "chat"

    @cached_property
    def completions(self) -> ChatCompletions:
        return ChatCompletions(self._client, self)


class OpenAIV1(JobResource):
    PATH_SEGMENT = "v1"

    @cached_property
    def chat(self) -> Chat:
        return Chat(self._client, self)

    @cached_property
    def completions(self) -> Completions:
        return Completions(self._client, self)

    def models(self, *, job_id: str) -> dict[str, Any]:
        """GET models."""
        body: dict[str, Any] = self._client.get(f"{self.endpoint(job_id=job_id)}/models").json()
        return body


class OpenAI(JobResource):
    PATH_SEGMENT = "openai"

    @cached_property
    def v1(self) -> OpenAIV1:
        return OpenAIV1(self._client, self)


class Inference(JobResource):
    PATH_SEGMENT = "inference"

    @cached_property
    def openai(self) -> OpenAI:
        return OpenAI(self._client, self)
