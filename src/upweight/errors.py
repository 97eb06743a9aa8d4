"""The one exception tree. Every error that upweight raises on purpose descends from `UpweightError`.

A message is one line: it names the field or thing, the value and the remedy.
"""


class UpweightError(Exception):
    """Base of everything raised on purpose."""


class TokenFactoryError(UpweightError):
    """Base of what the API client raises (`upweight.api_client`)."""


class RolloutError(UpweightError):
    """Base of what the rollout runner raises (`upweight.rollout`)."""


class ConfigError(UpweightError, ValueError):
    """A setting is missing, unknown or out of range."""


class ModelError(UpweightError):
    """A model cannot be found, read or run."""


class ModelNotFound(ModelError):
    """The named model is not on this machine."""


class UnsupportedModel(ModelError):
    """The files are there but their architecture, scaling or tokenizer is not known."""


class EngineError(UpweightError):
    """The inference engine cannot serve a request."""


class RequestError(EngineError, ValueError):
    """One request is invalid; `field` names the part of it."""

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class TrainingError(UpweightError):
    """A training step cannot be made."""


class BatchError(TrainingError, ValueError):
    """A batch given to a trainer lacks something, or a value or shape in it is wrong."""


class BatchTypeError(TrainingError, TypeError):
    """A batch, model output or adapter is of a kind that a trainer cannot use."""


class MissingBatchKey(TrainingError, KeyError):
    """A batch given as a mapping lacks a key."""

    __str__ = Exception.__str__  # KeyError would quote the sentence


class ServerError(UpweightError):
    """The job server cannot start or go on."""


class StoreError(ServerError):
    """The store is unreachable, locked, full or not writable."""


class WorkerError(ServerError):
    """A worker process died or refused an order."""
