"""What a run costs: a trace of a few steps, and memory over time."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from upweight.errors import ConfigError
from upweight.training.callbacks.base import BaseCallback, Logs


@dataclass(slots=True)
class ProfilingConfig:
    log_dir: str | Path = "logs/profiles"
    start_step: int = 10  # counted from 0
    end_step: int = 20  # the first step that is not traced any more

    def __post_init__(self) -> None:
        if not 0 <= self.start_step < self.end_step:
            raise ConfigError(
                f"start_step is {self.start_step} and end_step {self.end_step}; 0 ≤ start < end is needed"
            )


class JAXProfiler(BaseCallback):
    """A JAX trace of the steps from `start_step` to before `end_step`, for TensorBoard or Perfetto."""

    __slots__ = ("_is_running", "config", "steps")

    def __init__(self, config: ProfilingConfig | None = None) -> None:
        self.config = ProfilingConfig() if config is None else config
        self.steps = 0
        self._is_running = False

    def on_batch_begin(self, trainer: Any, batch: int) -> None:
        if self.steps == self.config.start_step and not self._is_running:
            import jax

            Path(self.config.log_dir).mkdir(parents=True, exist_ok=True)
            jax.profiler.start_trace(str(self.config.log_dir))
            self._is_running = True

    def on_batch_end(self, trainer: Any, batch: int, logs: Logs) -> None:
        self.steps += 1
        if self.steps >= self.config.end_step:
            self.close()

    def on_train_end(self, trainer: Any) -> None:
        self.close()

    def close(self) -> None:
        if self._is_running:
            import jax

            jax.profiler.stop_trace()
            self._is_running = False


@dataclass(slots=True)
class MemoryProfileConfig:
    log_dir: str | Path = "logs/memory"
    profile_every_n_steps: int = 100
    log_device_memory: bool = True

    def __post_init__(self) -> None:
        if self.profile_every_n_steps < 1:
            raise ConfigError(f"profile_every_n_steps is {self.profile_every_n_steps}; it must be at least 1")


class MemoryProfiler(BaseCallback):
    """Appends to `memory.jsonl` in `log_dir`: step, resident bytes of this process, and bytes in use per device that says."""

    __slots__ = ("config", "steps")

    def __init__(self, config: MemoryProfileConfig | None = None) -> None:
        self.config = MemoryProfileConfig() if config is None else config
        self.steps = 0

    def on_batch_end(self, trainer: Any, batch: int, logs: Logs) -> None:
        if self.steps % self.config.profile_every_n_steps == 0:
            self._write()
        self.steps += 1

    def _write(self) -> None:
        import psutil

        entry: dict[str, Any] = {"step": self.steps, "resident_bytes": psutil.Process().memory_info().rss}
        if self.config.log_device_memory:
            entry["device_bytes"] = _device_bytes()
        folder = Path(self.config.log_dir)
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "memory.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")


def _device_bytes() -> dict[str, int]:
    """Devices that keep no such statistics, as CPUs, are left out."""
    import jax

    statistics = {str(device): device.memory_stats() for device in jax.local_devices()}
    return {name: int(found["bytes_in_use"]) for name, found in statistics.items() if found}
