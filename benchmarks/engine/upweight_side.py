"""One engine of ours behind standard input: a line `CASE SEED` gives a line of JSON. Started by `run`."""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.engine.roofline import roofline
from benchmarks.engine.workloads import CONTEXT, workload
from upweight.inference.compilation_cache import use_compilation_cache
from upweight.inference.engine import Engine
from upweight.inference.gather import answers_to
from upweight.inference.types import SamplingParams
from upweight.weights.loading import load_model


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--cache")
    parser.add_argument("--device")
    args = parser.parse_args()
    if args.device:
        jax.config.update("jax_platforms", args.device)
    if args.cache:
        use_compilation_cache(args.cache)
    model = load_model(args.model, jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16)
    compiled = CompilationWatch()
    engines = {rows: Engine(model.config, model.params, model.tokenizer, max_rows=rows) for rows in (1, 32)}
    warm_ups = [engine.warm_up(CONTEXT) for engine in engines.values()]
    ready = {"programs": sum(one.programs for one in warm_ups), "warm_up_seconds": sum(one.seconds for one in warm_ups)}
    ready["compile_seconds"] = compiled.seconds
    watches = {rows: DeviceWatch(engine.start()) for rows, engine in engines.items()}
    for line in sys.stdin:
        name, seed = line.split()
        if name == "roofline":
            answer = roofline(model.config, model.params)
        else:
            work = workload(name, int(seed))
            rows = 1 if name == "single" else 32
            engine, device = engines[rows], watches[rows]
            before = engine.stats()["steps"]
            began, cpu, programs = time.perf_counter(), time.process_time(), compiled.count
            device.seconds = 0.0
            outputs = answers_to(
                engine,
                work.prompts,
                [
                    SamplingParams(max_tokens=n, top_p=work.top_p, ignore_eos=True, seed=i)
                    for i, n in enumerate(work.lengths)
                ],
            )
            answer = {
                "seconds": time.perf_counter() - began,
                "cpu_seconds": time.process_time() - cpu,
                "tokens": sum(len(output.logprobs) for output in outputs),
                "steps": engine.stats()["steps"] - before,
                "compiled": compiled.count - programs,
            } | ready
            answer["python_share"] = 1 - device.seconds / answer["seconds"]
        answer["peak_gb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
        print(json.dumps(answer), flush=True)
    for engine in engines.values():
        engine.stop()


class CompilationWatch:
    """Counts what XLA compiles, programs fetched from the cache included."""

    def __init__(self) -> None:
        self.count = 0
        self.seconds = 0.0
        jax.monitoring.register_event_duration_secs_listener(self._heard)

    def _heard(self, event: str, duration: float, **_: object) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            self.count += 1
            self.seconds += duration


class DeviceWatch:
    """Seconds inside compiled programs; the rest of a run is Python: plans, arrays of a step, text, hand-over."""

    def __init__(self, engine: Engine) -> None:
        self.seconds = 0.0
        programs = engine.runner.programs
        for name in ("prefill", "forward", "draw", "load_all", "load_some"):
            setattr(programs, name, self._timed(getattr(programs, name)))

    def _timed(self, program: Any) -> Any:
        def call(*inputs: Any, **options: Any) -> Any:
            began = time.perf_counter()
            made = jax.block_until_ready(program(*inputs, **options))
            self.seconds += time.perf_counter() - began
            return made

        return call


if __name__ == "__main__":
    main()
