"""What the commands of `upweight jobs` print: documents of the server in, lines out. No I/O, no clock of its own.

`width` is that of the terminal; None (a pipe or file) breaks and clips nothing.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import PurePath
from typing import Any

from upweight.cli.columns import age, bar, clipped, fields, number, table
from upweight.cli.connection import JOB_VARIABLE, KEY_VARIABLE, URL_VARIABLE, Place

Document = Mapping[str, Any]

OVER = ("succeeded", "failed", "cancelled")
VERSIONS_SHOWN = 20
_FATES = ("trained", "zero_advantage", "masked", "stale", "refused", "not_yet_trained")
_VERSION_HEADER = ("VERSION", "REWARD", "LOSS", "MISMATCH", "SAMPLES", "SECONDS", "FINGERPRINT", "")
_RIGHT = ("VERSION", "REWARD", "LOSS", "MISMATCH", "SAMPLES", "SECONDS", "TRAINED", "AGE")


def created_lines(job: Document, place: Place, *, show_key: bool) -> list[str]:
    """Comments and exports, so that a shell can `eval` them."""
    batches = job.get("total_steps")
    until = f"{batches} batches" if batches else "batches until cancelled"
    has_file = (job.get("training_method") or {}).get("type", "reinforcement") != "reinforcement"
    if has_file:  # which no rollout script feeds
        return [
            f"job {job['id']} ({_status(job)}): {job['model']}, {until}, {job.get('batch_size')} rows of {job['training_file']} each",
            f"watch it with: upweight jobs watch {job['id']}",
        ]
    return [
        f"# job {job['id']} ({_status(job)}): {job['model']}, {until}, {job.get('batch_size')} samples each",
        *(f"export {name}={value}" for name, value in exports(job["id"], place, show_key=show_key).items()),
        f"# watch it with: upweight jobs watch {job['id']}",
    ]


def exports(job_id: str, place: Place, *, show_key: bool) -> dict[str, str]:
    """Shell words by variable, as a rollout script needs them; the key in clear only with `show_key`."""
    if show_key:
        key = shlex.quote(place.key)
    elif place.key_file:
        key = f'"$(cat {shlex.quote(place.key_file)})"'
    else:  # the shell has it already, or was given it just now
        key = f'"${{{KEY_VARIABLE}:?give the key of {place.key_from} here}}"'
    return {URL_VARIABLE: shlex.quote(place.url), KEY_VARIABLE: key, JOB_VARIABLE: shlex.quote(job_id)}


def list_lines(jobs: Sequence[Document], now: float, *, width: int | None = None) -> list[str]:
    header = ("JOB", "STATUS", "TRAINED", "AGE", "MODEL")
    rows = [(job["id"], _status(job), _batches(job), age(now - job["created_at"]), _model_name(job)) for job in jobs]
    return [clipped(line, width) for line in table(header, rows, right=_RIGHT)]


def show_lines(
    job: Document, progress: Document, now: float, *, width: int | None = None, most_versions: int | None = None
) -> list[str]:
    """The whole screen of one job; at most `most_versions` of its versions, the newest."""
    lines = [f"{job['id']}  {progress['job_status']}", *fields(_fields(job, progress, now), width=width)]
    versions = progress["versions"]
    if not versions:
        return lines
    shown = versions if most_versions is None else versions[-most_versions:]
    lines += ["", *version_lines(shown)]
    if hidden := len(versions) - len(shown):
        lines.append(f"and {hidden} older {'version' if hidden == 1 else 'versions'} (--all)")
    return lines


def version_lines(versions: Sequence[Document]) -> list[str]:
    return table(_VERSION_HEADER, [_version_row(version) for version in versions], right=_RIGHT)


def state_line(progress: Document) -> str:
    """`waiting_for_samples  batch 0 holds 3 of 8 samples`"""
    return f"{progress['job_status']:19}  {progress['reason']}".rstrip()


def version_line(version: Document) -> str:
    """One version on a line of its own, for logs."""
    metrics = version["metrics"]
    parts = [
        f"{label} {metrics[name]:{form}}"
        for label, name, form in (("reward", "reward_mean", ".3f"), ("loss", "loss", ".4g"), ("mismatch", *_MISMATCH))
        if metrics.get(name) is not None
    ]
    parts += [f"{version['seconds']:.1f} s"] if version["version"] else []
    parts += ["update skipped"] if version["update_skipped"] else []
    name = f"version {version['version']}"
    return f"{name:19}  {'  '.join([*parts, short(version['fingerprint'])])}"


def end_line(progress: Document) -> str:
    """Like `state_line`, with the place of the weights."""
    weights = progress["weights"]
    return state_line(progress) + (f"; weights: {weights}" if weights else "")


def short(fingerprint: str) -> str:
    return fingerprint[:12]


_MISMATCH = ("mismatch_max", ".2g")


def _version_row(version: Document) -> tuple[str, ...]:
    metrics = version["metrics"]
    trained = version["version"] > 0
    notes = ["skipped"] if version["update_skipped"] else []
    notes += ["saved"] if version["checkpoint"] else []
    return (
        str(version["version"]),
        number(metrics.get("reward_mean"), ".3f"),
        number(metrics.get("loss"), ".4g"),
        number(metrics.get(_MISMATCH[0]), _MISMATCH[1]),
        number(metrics.get("samples_trained"), ".0f"),
        number(version["seconds"] if trained else None, ".1f"),
        short(version["fingerprint"]),
        " ".join(notes),
    )


def _fields(job: Document, progress: Document, now: float) -> list[tuple[str, str]]:
    error = progress["error"]
    return [
        ("reason", progress["reason"] if not error else f"{error['message']} ({error['code']})"),
        ("model", job["model"]),
        ("suffix", job.get("suffix") or ""),
        ("method", _method(job)),
        (
            "created",
            f"{datetime.fromtimestamp(job['created_at']):%Y-%m-%d %H:%M:%S}, {age(now - job['created_at'])} ago",
        ),
        ("batches", _filled(progress)),
        ("version", _served(progress)),
        ("samples", ledger_text(progress["ledger"])),
        ("scores", _scores(progress["client_metrics"])),
        ("worker", _worker(progress["worker"])),
        ("weights", progress["weights"] or ""),
        ("try it", f"upweight chat {job['id']}" if progress["weights"] else ""),
    ]


def ledger_text(ledger: Mapping[str, int]) -> str:
    """`24 accepted = 16 trained + 8 zero advantage; 3 unmatched`"""
    parts = [f"{ledger[fate]} {fate.replace('_', ' ')}" for fate in _FATES if ledger.get(fate)]
    text = f"{ledger['accepted']} accepted" + (f" = {' + '.join(parts)}" if parts else "")
    apart = [f"{ledger[name]} {name}" for name in ("unmatched", "filtered", "truncated") if ledger.get(name)]
    return "; ".join([text, *apart])


def _filled(progress: Document) -> str:
    total = progress["total_batches"]
    text = f"{progress['filled_batches']} of {total} filled" if total else f"{progress['filled_batches']} filled"
    if progress["job_status"] in OVER:
        return text
    size = progress["batch_size"]
    return f"{text}, next {bar(progress['in_batch'], size)} {progress['in_batch']}/{size} samples"


def _served(progress: Document) -> str:
    served, newest = progress["inference_version"], progress["version"]
    if served is None:
        return "none is served yet"
    return f"{served} is served" + (f", {newest} is trained" if newest != served else "")


def _scores(measured: Sequence[Document]) -> str:
    """The first and the newest scores that the client measured on held-out tasks."""
    ends = measured if len(measured) < 2 else (measured[0], measured[-1])
    return " → ".join(
        f"batch {entry['batch_index']}: " + ", ".join(f"{name} {value:.4g}" for name, value in entry["metrics"].items())
        for entry in ends
    )


def _worker(worker: Document | None) -> str:
    if worker is None:
        return ""
    parts = [f"process {worker['pid']}", worker["phase"]]
    parts += [f"{worker['tokens_per_second']:.0f} tokens/s"] if worker.get("tokens_per_second") else []
    return ", ".join([*parts, f"{worker['peak_memory_bytes'] / 1e9:.1f} GB at most"])


def _method(job: Document) -> str:
    method = job.get("training_method") or {}
    kind = method.get("type", "reinforcement")
    settings = method.get(kind) or {}
    settings = settings.get("hyperparameters", settings)
    if not settings:
        return ""
    rank = settings["lora"].get("rank") if isinstance(settings.get("lora"), dict) else settings.get("lora_r")
    lora = f", LoRA rank {rank}" if settings.get("lora") else ""
    return f"{settings.get('algorithm', kind)}, learning rate {settings['learning_rate']:g}{lora}"


def _status(job: Document) -> str:
    return str(job.get("job_status") or job["status"])


def _batches(job: Document) -> str:
    total = job.get("total_steps")
    return f"{job.get('trained_steps') or 0}/{total if total else '∞'}"


def _model_name(job: Document) -> str:
    """Folders by their last part: the whole path is in `jobs show`."""
    model = str(job["model"])
    return PurePath(model).name if model.startswith("/") else model
