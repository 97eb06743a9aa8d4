"""Looks through the groups of a run: `python -m upweight.rollout.group_log FILE [--fate failed] [--task TASK-ID]`."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from upweight.rollout.group_log import FATES, read_groups

SHOWN_CHARS = 60


def line_of(group: dict[str, Any]) -> str:
    """One group in one line."""
    when = time.strftime("%H:%M:%S", time.localtime(group["time"]))
    rewards = [_reward(sample) for sample in group["samples"]]
    lengths = [len(sample["token_ids"]) for sample in group["samples"]]
    said = f"rewards {rewards}, tokens {lengths}" if rewards else group["error"] or ""
    task = json.dumps(group["task"], ensure_ascii=False)
    task = task if len(task) <= SHOWN_CHARS else f"{task[:SHOWN_CHARS]}…"
    return f"{when} {group['task_id']} version {group['version']} {group['fate']}: {said}; task {task}"


def _reward(sample: dict[str, Any]) -> float:
    raw = sample["debug_info"].get("reward", sample["normalized_reward"])
    return round(raw, 4) if isinstance(raw, int | float) else raw


def _texts(groups: Iterator[dict[str, Any]], fate: str | None, task: str | None) -> Iterator[str]:
    for group in groups:
        if task is not None:
            if group["task_id"] == task:
                yield json.dumps(group, indent=1, ensure_ascii=False)
        elif fate in (None, group["fate"]):
            yield line_of(group)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m upweight.rollout.group_log", description="Look through a run's groups."
    )
    parser.add_argument("file", type=Path, help="what the setting group_log named")
    parser.add_argument("--fate", choices=FATES)
    parser.add_argument("--task", help="show this task's group in full")
    options = parser.parse_args(arguments)
    try:
        for text in _texts(read_groups(options.file), options.fate, options.task):
            print(text, flush=True)
    except BrokenPipeError:  # `| head` has seen enough; what is left in the buffer must not fail at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        parser.error(f"{options.file} cannot be read: {error.strerror}")
    except (ValueError, LookupError, TypeError) as error:
        parser.error(f"{options.file} is no log of groups: {type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
