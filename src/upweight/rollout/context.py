"""What a rollout function gets to reach the model."""

from __future__ import annotations

import threading
from functools import cached_property
from typing import TYPE_CHECKING, Any

from upweight.api_client import TokenFactory
from upweight.rollout.config import RolloutConfig

if TYPE_CHECKING:  # openai is slow to import; it is loaded on first use
    from openai import AsyncOpenAI, OpenAI

_creation = threading.Lock()


class RolloutContext:
    """Config and clients of one run. Compared by identity; picklable at any time (live clients stay behind)."""

    def __init__(self, config: RolloutConfig, api_client: TokenFactory) -> None:
        self.config = config
        self.api_client = api_client
        self.shared: dict[Any, Any] = {}  # what helpers keep for the life of this context; it does not travel
        self._openai_client: OpenAI | None = None

    @cached_property
    def openai_endpoint(self) -> str:
        """Base URL of the job's OpenAI-compatible routes."""
        job = self.api_client.v1alpha1.fine_tuning.jobs.endpoint(job_id=self.config.job_id)
        return f"{job}/inference/openai/v1"

    @property
    def openai_client(self) -> OpenAI:
        """One client for all threads, made on first use, and anew after a rollout has closed it."""
        with _creation:
            if self._openai_client is None or self._openai_client.is_closed():
                from openai import OpenAI

                self._openai_client = OpenAI(base_url=self.openai_endpoint, api_key=self.api_client.api_key)
            return self._openai_client

    def async_openai_client(self, **kw: Any) -> AsyncOpenAI:
        """A new client, to be closed by the caller."""
        from openai import AsyncOpenAI

        return AsyncOpenAI(**{"base_url": self.openai_endpoint, "api_key": self.api_client.api_key, **kw})

    def close(self) -> None:
        """Close the live client; it is made anew when asked for again."""
        with _creation:
            client, self._openai_client = self._openai_client, None
        if client is not None:
            client.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_openai_client": None, "shared": {}}

    def __repr__(self) -> str:
        return f"RolloutContext(job_id={self.config.job_id!r}, base_url={self.api_client.base_url!r})"
