"""Samples per second of the rollout SDK with a rollout function that does nothing, beside the floor measured in the same run.

    python -m benchmarks.sdk.run [--samples 20000] [--tokens 512] [--modes floor,thread,async] [--profile]
    python -m benchmarks.sdk.run --samples 200000 --flat 32    # ends with 1 if a run grew by more than 32 MB after its first fifth

Each measurement runs in a process of its own against a server in another one; the result is JSON on standard output. The floor
is one bare `httpx.Client` posting the same bytes, `batch_size` samples a request.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import platform
import pstats
import resource
import subprocess
import sys
import time
from statistics import median
from typing import Any

import httpx

from upweight.api_client import TokenFactory
from upweight.rollout import RolloutConfig, RolloutRunner
from upweight.rollout.models import Sample, SampleGroup
from upweight.rollout.validation import encode_group

GROUP, BATCH = 8, 512
SETTLED = 0.2  # share of a run after which its memory should not grow


def make_group(n_tokens: int) -> list[dict[str, Any]]:
    context, trained = n_tokens // 4, n_tokens - n_tokens // 4
    return [
        {
            "token_ids": list(range(1000, 1000 + n_tokens)),
            "logprobs": [0.0] * context + [-0.123456789] * trained,
            "mask": [0] * context + [1] * trained,
            "normalized_reward": 0.5,
        }
        for _ in range(GROUP)
    ]


class Tasks:
    def sample(self, n_samples: int) -> list[int]:
        return [0] * n_samples


def memory_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def memory_figures(memory: list[int]) -> dict[str, Any]:
    """Resident megabytes after each tenth of the batches, and the growth of the median from the first settled tenth to the last."""
    n = len(memory) - 1
    tenth = max(1, n // 10)
    settled = memory[int(n * SETTLED) :]
    growth = median(settled[-tenth:]) - median(settled[:tenth])
    return {
        "resident_mb": {f"{10 * i} %": round(memory[n * i // 10] / 1e6, 1) for i in range(11)},
        "growth_mb": round(growth / 1e6, 1),
    }


def measure_floor(url: str, samples: int, tokens: int) -> dict[str, Any]:
    group = SampleGroup(samples=[Sample(**fields) for fields in make_group(tokens)])
    one = [sample.stamp("task", 0).body for sample in encode_group("task", group, GROUP)]
    body = b'{"samples":[%b]}' % b",".join(one[i % GROUP] for i in range(BATCH))
    with httpx.Client(timeout=60) as client:
        target = f"{url}/v1alpha1/fine_tuning/jobs/job/batches/0/samples"
        headers = {"Content-Type": "application/json"}
        client.post(target, content=body, headers=headers)
        began, cpu = time.perf_counter(), time.process_time()
        for _ in range(samples // BATCH):
            client.post(target, content=body, headers=headers).raise_for_status()
        seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu
    n = samples // BATCH * BATCH
    return {
        "samples_per_second": n / seconds,
        "cpu_ms_per_sample": 1000 * cpu_seconds / n,
        "bytes_per_sample": len(body) / BATCH,
    }


def measure_sdk(url: str, samples: int, tokens: int, mode: str) -> dict[str, Any]:
    fields = make_group(tokens)

    def rollout(task: int, context: Any) -> SampleGroup:
        return SampleGroup(samples=[Sample(**one) for one in fields])

    async def rollout_async(task: int, context: Any) -> SampleGroup:
        return rollout(task, context)

    n = samples // BATCH
    config = RolloutConfig(
        job_id="job",
        model_name="m",
        batch_size=BATCH,
        num_batches=n,
        num_samples_per_task=GROUP,
        max_concurrency=64 * GROUP,
        allowed_staleness=None,
    )
    memory: list[int] = []
    with TokenFactory(url, "key") as client:
        runner = RolloutRunner(client, config, rollout_async if mode == "async" else rollout, Tasks(), progress="none")
        watch = runner._publish

        def publish(progress: Any) -> None:
            watch(progress)
            while len(memory) <= progress.batches_filled:
                memory.append(memory_bytes())

        runner._publish = publish  # type: ignore[method-assign]
        began, cpu = time.perf_counter(), time.process_time()
        summary = runner.run()
        seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu
    assert summary.batches_filled == n, summary
    counts = httpx.get(f"{url}/counts").json()
    return {
        "samples_per_second": n * BATCH / seconds,
        "cpu_ms_per_sample": 1000 * cpu_seconds / (n * BATCH),
        "uploads_per_batch": counts["uploads"] / n,
        **memory_figures(memory),
        "peak_resident_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000, 1),
        "waited": summary.waited,
    }


def in_own_process(mode: str, args: argparse.Namespace) -> dict[str, Any]:
    with subprocess.Popen(
        [sys.executable, "-m", "benchmarks.sdk.server", str(BATCH)], stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        url = f"http://127.0.0.1:{int(server.stdout.readline())}"
        command = [sys.executable, "-m", "benchmarks.sdk.run", "--one", mode, "--url", url]
        command += ["--samples", str(args.samples), "--tokens", str(args.tokens)] + ["--profile"] * args.profile
        try:
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        finally:
            server.terminate()
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=20_000)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--modes", default="floor,thread,async")
    parser.add_argument("--flat", type=float, metavar="MB", help="fail when the memory of a run grew by more than this")
    parser.add_argument("--profile", action="store_true", help="where the time of each thread goes, on standard error")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one is not None:
        profile = cProfile.Profile() if args.profile else None
        if profile is not None:
            profile.enable()
        measure = (
            measure_floor(args.url, args.samples, args.tokens)
            if args.one == "floor"
            else measure_sdk(args.url, args.samples, args.tokens, args.one)
        )
        if profile is not None:
            profile.disable()
            pstats.Stats(profile, stream=sys.stderr).sort_stats("tottime").print_stats(20)
        print(json.dumps(measure))
        return
    results = {mode: in_own_process(mode, args) for mode in args.modes.split(",")}
    floor = results.get("floor")
    for mode, result in results.items():
        if floor is not None and mode != "floor":
            result["share_of_floor"] = result["samples_per_second"] / floor["samples_per_second"]
    place = {"python": platform.python_version(), "cpus": os.cpu_count(), "load": os.getloadavg()[0]}
    settings = {"samples": args.samples, "tokens": args.tokens, "batch_size": BATCH, "group_size": GROUP}
    print(json.dumps({"settings": settings, "machine": place, "results": results}, indent=1))
    grown = [
        mode for mode, result in results.items() if args.flat is not None and result.get("growth_mb", 0) > args.flat
    ]
    if grown:
        sys.exit(f"memory grew by more than {args.flat} MB in: {', '.join(grown)}")


if __name__ == "__main__":
    main()
