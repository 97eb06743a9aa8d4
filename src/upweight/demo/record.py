"""What a demo run must remember to be finished later: one small JSON file, always whole."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from upweight.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """What the user chose."""

    model: str = "SmolLM2-135M-Instruct"
    steps: int | None = None  # None = as many as fit the time, by calibration
    lora: bool = True
    seed: int = 0
    quick: bool = False


@dataclass(kw_only=True)
class RunRecord:
    """State of one run; written after every change that a resumption needs."""

    options: DemoOptions
    run_id: str
    batches: int | None = None
    job_id: str | None = None
    before: dict[str, Any] | None = None  # Evaluation before training
    finished: bool = False
    seconds: float = 0.0  # of earlier parts of the run
    cpu_seconds: float = 0.0
    peak_memory_bytes: int = 0

    def save(self, home: Path) -> None:
        path = record_file(home)
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_suffix(f".{os.getpid()}")
        with aside.open("w") as file:
            json.dump(asdict(self), file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)


def record_file(home: Path) -> Path:
    return home / "demo" / "run.json"


def load_record(home: Path) -> RunRecord | None:
    """The last run, or None. Raises ConfigError when the file is not one of ours."""
    path = record_file(home)
    try:
        raw = json.loads(path.read_text())
        return RunRecord(**{**raw, "options": DemoOptions(**raw["options"])})
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{path} cannot be read ({error}); remove it and start anew without --resume") from error
