"""The tables. Numbers per token are packed little-endian rows; everything a person may read is JSON or text."""

from __future__ import annotations

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Float,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    UniqueConstraint,
)

SCHEMA_VERSION = 3
# Older version → what makes it the next one. New tables need nothing.
UPGRADES: dict[str, tuple[str, ...]] = {
    "2": (
        "ALTER TABLE completions ADD COLUMN finish_reason VARCHAR",
        "ALTER TABLE samples ADD COLUMN truncated BOOLEAN",
        "INSERT INTO counts (job_id, name, count) SELECT job_id, 'accepted', count(*) FROM samples GROUP BY job_id",
        "INSERT INTO counts (job_id, name, count)"
        " SELECT job_id, fate, count(*) FROM samples WHERE fate IS NOT NULL GROUP BY job_id, fate",
        "INSERT INTO counts (job_id, name, count)"
        " SELECT job_id, 'unmatched', count(*) FROM samples WHERE matched = FALSE GROUP BY job_id",
        "INSERT INTO counts (job_id, name, count)"
        " SELECT job_id, 'filtered', count(*) FROM samples WHERE filtered = TRUE GROUP BY job_id",
    )
}

metadata = MetaData()
Count = BigInteger().with_variant(Integer(), "sqlite")  # SQLite numbers its rows in an INTEGER column only

properties = Table("properties", metadata, Column("name", String, primary_key=True), Column("value", String))

projects = Table(
    "projects", metadata, Column("id", String, primary_key=True), Column("created_at", Float, nullable=False)
)

api_keys = Table(
    "api_keys",
    metadata,
    Column("hash", String, primary_key=True),  # sha256 of the key; the key itself is never stored here
    Column("project", String, nullable=False),
    Column("created_at", Float, nullable=False),
)

jobs = Table(
    "jobs",
    metadata,
    Column("seq", Count, primary_key=True, autoincrement=True),
    Column("id", String, nullable=False, unique=True),
    Column("project", String, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("started_at", Float),
    Column("finished_at", Float),
    Column("job_status", String, nullable=False),
    Column("reason", String, nullable=False),
    Column("model", String, nullable=False),
    Column("model_path", String, nullable=False),
    Column("request", JSON, nullable=False),  # the request's known fields, without secrets
    # What a job of any kind trains with; the column is older than the other kinds.
    Column("reinforcement", JSON, key="settings", nullable=False),
    Column("batch_size", Integer, nullable=False),
    Column("total_batches", Integer),
    Column("filled_batches", Integer, nullable=False, default=0),
    Column("inference_version", Integer),
    Column("error", JSON),
    Column("weights", String),
)

files = Table(
    "files",
    metadata,
    Column("seq", Count, primary_key=True, autoincrement=True),
    Column("id", String, nullable=False, unique=True),
    Column("project", String, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("filename", String, nullable=False),
    Column("purpose", String, nullable=False),
    Column("size", Count, nullable=False),
    Column("sha256", LargeBinary, nullable=False),
    Column("deleted_at", Float),
    Index("files_of_project", "project", "seq"),
)

models = Table(
    "models",
    metadata,
    Column("seq", Count, primary_key=True, autoincrement=True),
    Column("id", String, nullable=False, unique=True),
    Column("project", String, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("name", String, nullable=False),
    Column("job_id", String, nullable=False),
    Column("version", Integer, nullable=False),
    Column("fingerprint", String, nullable=False),
    Column("path", String, nullable=False),
    Column("settings", JSON, nullable=False),  # of its job
    UniqueConstraint("project", "name"),
)

batches = Table(
    "batches",
    metadata,
    Column("job_id", String, primary_key=True),
    Column("batch_index", Integer, primary_key=True),
    Column("sample_count", Integer, nullable=False, default=0),
    Column("created_at", Float, nullable=False),
    Column("filled_at", Float),
    Column("joined_to", Count),  # samples.seq of the newest sample that its groups take into account
)

samples = Table(
    "samples",
    metadata,
    Column("seq", Count, primary_key=True, autoincrement=True),  # order of acceptance
    Column("job_id", String, nullable=False),
    Column("id", String, nullable=False),
    Column("content_hash", LargeBinary, nullable=False),
    Column("batch_index", Integer, nullable=False),
    Column("token_ids", LargeBinary, nullable=False),  # int32
    Column("logprobs", LargeBinary, nullable=False),  # float32
    Column("mask", LargeBinary, nullable=False),  # uint8
    Column("reward", Float, nullable=False),
    Column("task_id", String),
    Column("raw_reward", Float),
    Column("metadata", JSON, nullable=False),
    Column("debug_info", JSON, nullable=False),
    # written when the batch is built, so that a replay reads the same numbers
    Column("matched", Boolean),
    Column("filtered", Boolean),
    Column("truncated", Boolean),  # its last answer was cut by the length limit
    Column("temperatures", LargeBinary),  # float32
    Column("filtered_tokens", LargeBinary),  # uint8
    Column("raw_logprobs", LargeBinary),  # float32
    Column("versions", LargeBinary),  # int32
    Column("fate", String),
    UniqueConstraint("job_id", "id"),
    Index("samples_of_batch", "job_id", "batch_index", "seq"),
    Index("samples_of_task", "job_id", "task_id"),
)

counts = Table(
    "counts",  # of a job's samples, see store/counts.py
    metadata,
    Column("job_id", String, primary_key=True),
    Column("name", String, primary_key=True),
    Column("count", Count, nullable=False),
)

completions = Table(
    "completions",
    metadata,
    Column("seq", Count, primary_key=True, autoincrement=True),
    Column("job_id", String, nullable=False),
    Column("key", LargeBinary, nullable=False),  # hash of the exact prompt and output ids
    Column("created_at", Float, nullable=False),
    Column("logprobs", LargeBinary),  # float32, of the sampling distribution
    Column("raw_logprobs", LargeBinary),  # float32
    Column("versions", LargeBinary, nullable=False),  # int32
    Column("temperature", Float, nullable=False),
    Column("filtered", Boolean, nullable=False),
    Column("settings", JSON, nullable=False),
    Column("finish_reason", String),
    Index("completions_by_key", "job_id", "key"),
)

versions = Table(
    "versions",
    metadata,
    Column("job_id", String, primary_key=True),
    Column("version", Integer, primary_key=True),
    Column("created_at", Float, nullable=False),
    Column("fingerprint", String, nullable=False),
    Column("update_skipped", Boolean, nullable=False),
    Column("seconds", Float, nullable=False),
    Column("metrics", JSON, nullable=False),
    Column("checkpoint", String),
)

events = Table(
    "events",
    metadata,
    Column("seq", Count, primary_key=True, autoincrement=True),
    Column("job_id", String, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("level", String, nullable=False),
    Column("message", String, nullable=False),
    Column("type", String, nullable=False),
    Column("data", JSON),
    Index("events_of_job", "job_id", "seq"),
)

client_metrics = Table(
    "client_metrics",
    metadata,
    Column("seq", Count, primary_key=True, autoincrement=True),
    Column("job_id", String, nullable=False),
    Column("batch_index", Integer, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("metrics", JSON, nullable=False),
    Index("client_metrics_of_job", "job_id", "batch_index"),
)

repeats = Table(
    "repeats",
    metadata,
    Column("project", String, primary_key=True),
    Column("key", String, primary_key=True),
    Column("request_hash", LargeBinary, nullable=False),  # over method, path and body
    Column("status", Integer, nullable=False),
    Column("answer", JSON, nullable=False),
    Column("created_at", Float, nullable=False),
)
