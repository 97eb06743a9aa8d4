"""What the API process and a job's worker process say to each other.

The worker (`python -m upweight.server.worker SPEC.json`) holds model, engine and trainer. It never sees the store. The API process
holds the store and never imports JAX. They talk HTTP over a Unix socket:

| route | body | answer |
|---|---|---|
| GET  /state | – | `WorkerState` |
| POST /train?batch_index=K | `encode_batch(TrainBatch)`; empty = the batch K of the spec's `training_file` | `TrainResult`; 409 when K is not the worker's version |
| POST /checkpoint | – | `CheckpointResult`: complete on disk |
| POST /export | `{"path": folder}` | `{"path": folder}`: Hugging Face folder of the present weights |
| GET  /stats | – | counters of the engine, recent requests among them |
| POST /openai/v1/{chat/completions, completions, messages, messages/count_tokens}, GET /openai/v1/models[/ID], POST /render | as on the public wire | as on the public wire |

Invariants:
* The worker dies with its parent: its standard input is a pipe, end of file means exit now. SIGTERM likewise.
* Version k+1 exists only after batch k was trained; a /train order for another batch changes nothing.
* The same checkpoint and the same batches in the same order give the same fingerprints (bit-equal on CPU).
* A /train answer means: the engine already samples from the new version, and its arrays were fingerprinted.
* Exit code `LOAD_FAILED` means: model, settings or checkpoint cannot be used, the last line of standard error says why, and another
  start would meet the same.
"""

from __future__ import annotations

import io
from dataclasses import fields
from enum import StrEnum
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from upweight.ops.samples import TrainBatch

LOAD_FAILED = 3  # exit code: the last line of the log says why, and another start cannot help


class WorkerMode(StrEnum):
    TRAIN = "train"
    SERVE = "serve"


class WorkerSpec(BaseModel):
    """All that a worker is told at its start (one JSON file)."""

    model_config = ConfigDict(extra="forbid")

    job_id: str
    mode: WorkerMode = WorkerMode.TRAIN
    model: str = Field(description="folder or GGUF file of the start model, resolved to an absolute path")
    model_names: list[str] = Field(
        description="names under which requests may ask for the model; the first is reported"
    )
    method_type: str = Field(default="reinforcement", description="reinforcement, supervised or dpo")
    settings: dict[str, Any] = Field(
        default_factory=dict, description="what the job trains with: the validated method, defaults filled in"
    )
    training_file: str | None = Field(default=None, description="what a job that trains on a file trains on")
    validation_file: str | None = Field(default=None, description="what its versions with a checkpoint are measured on")
    socket: str = Field(description="path of the Unix socket to listen on")
    folder: str = Field(description="the job's own folder; checkpoints go to folder/checkpoints")
    checkpoint: str | None = Field(
        default=None, description="training state to start from; None = the start model, version 0"
    )
    cache_folder: str | None = Field(default=None, description="JAX compilation cache; None = off")
    max_slots: int = Field(default=32, ge=1, description="requests decoded at the same time")
    max_queue: int = Field(default=4096, ge=1, description="requests waiting beyond which the answer is 429")
    warm_up: int = Field(
        default=0, ge=0, description="compile at the start for requests of this many tokens, prompt and answer"
    )
    request_timeout: float | None = Field(
        default=None, gt=0, description="seconds after which a completion is aborted; None = no limit"
    )


class WorkerPhase(StrEnum):
    LOADING = "loading"
    COMPILING = "compiling"
    READY = "ready"
    TRAINING = "training"
    SAVING = "saving"


class WorkerState(BaseModel):
    phase: WorkerPhase
    detail: str = Field(default="", description="what is being done, for people")
    version: int | None = Field(default=None, description="version that the engine samples from; None until loaded")
    fingerprint: str | None = None
    peak_memory_bytes: int = 0
    cpu_seconds: float = 0.0
    notes: list[str] = Field(default_factory=list, description="what the job's events should tell, once each")
    stats: dict[str, float] = Field(default_factory=dict, description="engine counters: tokens, active, waiting, …")


class TrainResult(BaseModel):
    version: int = Field(description="version after this batch: batch index + 1")
    fingerprint: str = Field(description="over the arrays that the compiled decode receives")
    fingerprint_ok: bool = Field(description="engine's arrays equal what the trainer handed over")
    update_skipped: bool = Field(default=False, description="loss or gradient norm was not finite; weights unchanged")
    metrics: dict[str, float] = Field(default_factory=dict)
    fates: list[str] = Field(
        description="per sample, in batch order: trained | zero_advantage | masked | stale | refused"
    )
    seconds: float


class CheckpointResult(BaseModel):
    path: str
    version: int


class ExportResult(BaseModel):
    path: str


def encode_batch(batch: TrainBatch) -> bytes:
    out = io.BytesIO()
    np.savez(out, **{f.name: getattr(batch, f.name) for f in fields(TrainBatch)})
    return out.getvalue()


def decode_batch(body: bytes) -> TrainBatch:
    with np.load(io.BytesIO(body), allow_pickle=False) as arrays:
        return TrainBatch(**{f.name: arrays[f.name] for f in fields(TrainBatch)})
