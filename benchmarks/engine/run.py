"""Tokens per second of the engine, as a share of the machine's roofline and beside Hugging Face `generate` in the same run.

    python -m benchmarks.engine.run [--cases group,top_p,mixed,single,…] [--runs 3] [--peer hf --peer-python VENV/bin/python]
                                    [--device gpu] [--http] [--cache FOLDER]

Runs of the two sides alternate, each side in a process of its own that waits while the other works. The weights are SmolLM2-135M's.
`--http` adds 64 open-loop clients over the worker's HTTP routes, alone and beside training steps. JSON on standard output.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.engine.http_load import measure_http
from benchmarks.engine.workloads import NAMES


class Side:
    """A process that answers lines."""

    def __init__(self, command: list[str]) -> None:
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, name: str, seed: int) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(name, seed, file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the process of this side ended with {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


def exported_model(folder: Path) -> str:
    """SmolLM2-135M-Instruct as a Hugging Face folder, so that both sides read the same weights."""
    from upweight.weights.loading import load_model, save_model

    model = load_model("smollm2")
    save_model(folder / "model", model.config, model.raw_config, model.params, model.tokenizer)
    return str(folder / "model")


def rates(runs: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "tokens_per_s": median(run["tokens"] / run["seconds"] for run in runs),
        "tokens_per_cpu_s": median(run["tokens"] / run["cpu_seconds"] for run in runs),
        "peak_gb": max(run["peak_gb"] for run in runs),
    }


def compare(ours: Side, peer: Side | None, cases: list[str], runs: int) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for case in cases:
        sides = {"upweight": ours} | ({"hf": peer} if peer is not None else {})
        for side in sides.values():
            side.ask(case, 0)
        times: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
        rooflines = []
        for run in range(1, runs + 1):
            rooflines.append(ours.ask("roofline", 0))
            for name, side in sides.items():
                times[name].append(side.ask(case, run))
        roof = {name: median(one[name] for one in rooflines) for name in rooflines[0]}
        result: dict[str, Any] = {name: rates(found) for name, found in times.items()}
        bound = roof["memory_bound_tokens_per_s" if case.startswith("single") else "product_bound_tokens_per_s"]
        result["roofline"] = roof
        result["share_of_roofline"] = result["upweight"]["tokens_per_s"] / bound
        result["compiled_after_warm_up"] = sum(run["compiled"] for run in times["upweight"])
        result["python_share"] = median(run["python_share"] for run in times["upweight"])
        result["ms_per_step"] = median(1e3 * run["seconds"] / run["steps"] for run in times["upweight"])
        if peer is not None:
            pairs = list(zip(times["upweight"], times["hf"], strict=True))
            result["times_hf"] = median(theirs["seconds"] / own["seconds"] for own, theirs in pairs)
            result["times_hf_cpu"] = median(theirs["cpu_seconds"] / own["cpu_seconds"] for own, theirs in pairs)
        results[case] = result
        last = times["upweight"][-1]
        results["warm_up"] = {name: last[name] for name in ("programs", "compile_seconds", "warm_up_seconds")}
        print(case, json.dumps(result), file=sys.stderr, flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(NAMES))
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--peer", choices=["hf"])
    parser.add_argument("--peer-python", default=sys.executable, help="interpreter that has torch and transformers")
    parser.add_argument("--device", choices=["cpu", "gpu", "tpu"])
    parser.add_argument("--cache", help="folder of the compilation cache; without it everything is compiled anew")
    parser.add_argument("--http", action="store_true")
    args = parser.parse_args()
    here = Path(__file__).parent
    results: dict[str, Any] = {
        "machine": {"cpus": os.cpu_count(), "load": os.getloadavg()[0], "python": platform.python_version()}
    }
    with tempfile.TemporaryDirectory() as folder:
        model = exported_model(Path(folder))
        command = [sys.executable, "-m", "benchmarks.engine.upweight_side", "--model", model]
        command += ["--cache", args.cache] if args.cache else []
        command += ["--device", args.device] if args.device else []
        if cases := [name for name in args.cases.split(",") if name]:
            ours = Side(command)
            peer = Side([args.peer_python, str(here / "hf_side.py"), "--model", model]) if args.peer else None
            results |= compare(ours, peer, cases, args.runs)
            for side in (ours, peer):
                if side is not None:
                    side.close()
        if args.http:
            results["http"] = measure_http(model, Path(folder), args.cache)
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
