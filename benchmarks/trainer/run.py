"""CPU seconds and memory of the trainers' steps, beside a peer's trainers and TRL in the same run.

    python -m benchmarks.trainer.run [--cases grpo,ppo,dpo,…] [--steps 5] [--peer-python VENV/bin/python]
                                     [--shared] [--whole-step] [--trl-python VENV/bin/python]

`--peer-python` has `avitai-artifex`, whose trainers have the same names; each case runs once for each side, in a process of its own. The
peer has no precomputed reference scores: `dpo_precomputed` stands beside its `dpo`. JSON on standard output.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

OURS, PEER = "upweight.training.rl", "artifex.generative_models.training.rl"
MICROBATCHES = 2  # of ours: the same gradient with less memory; the peer takes a batch whole
CASES = ("grpo", "ppo", "dpo", "dpo_precomputed", "reinforce")
HERE = Path(__file__).parent


def answer_of(command: list[str]) -> dict[str, Any]:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}: {done.stderr[-800:]}")
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def product_speed() -> float:
    """fp32 GF per CPU second of square products of 2,048, in a process of its own."""
    code = (
        "import time, jax, jax.numpy as jnp\n"
        "x = jnp.ones((2048, 2048)); f = jax.jit(jnp.matmul); f(x, x).block_until_ready()\n"
        "t = time.process_time()\n"
        "for _ in range(20): x2 = f(x, x).block_until_ready()\n"
        "print('{\"speed\": %f}' % (20 * 2 * 2048**3 / (time.process_time() - t) / 1e9))"
    )
    return float(answer_of([sys.executable, "-c", code])["speed"])


def executed_gflop(case: str) -> float:
    """Products of one step that non-padding tokens need: forward 2, backward 4 per weight; the head once more, rematerialised."""
    import numpy as np

    from benchmarks.trainer.decoder import INNER, LAYERS, VOCABULARY, WIDTH
    from benchmarks.trainer.side import PROMPT, ROWS, sequences

    draw = np.random.default_rng(0)
    masks = [sequences(draw, ROWS // 2)[1] for _ in range(2)] if case.startswith("dpo") else [sequences(draw, ROWS)[1]]
    lengths = np.concatenate([PROMPT + mask.sum(1) for mask in masks])
    trained = float(sum(mask.sum() for mask in masks))
    layers = 2 * LAYERS * (4 * WIDTH**2 + 3 * WIDTH * INNER) * lengths.sum()
    attention = LAYERS * 2 * 2 * WIDTH * float((lengths * (lengths + 1) / 2).sum())
    head = 2 * WIDTH * VOCABULARY * trained
    policy = 3 * (layers + attention) + 4 * head
    reference = layers + attention + 2 * head if case == "grpo" else layers + attention + head if case == "dpo" else 0
    return float(policy + reference) / 1e9


def compare(case: str, steps: int, peer_python: str | None) -> dict[str, Any]:
    command = ["-W", "ignore", "-m", "benchmarks.trainer.side"]
    ours = answer_of([sys.executable, *command, OURS, case, "--steps", str(steps), "--microbatches", str(MICROBATCHES)])
    result: dict[str, Any] = {"upweight": ours, "gf_per_cpu_second": executed_gflop(case) / ours["cpu_seconds"]}
    if peer_python:
        theirs = answer_of(
            [peer_python, "-W", "ignore", str(HERE / "side.py"), PEER, case.partition("_")[0], "--steps", str(steps)]
        )
        result["peer"] = theirs
        result["times_fewer_cpu_seconds"] = theirs["cpu_seconds"] / ours["cpu_seconds"]
        result["share_of_peak_memory"] = ours["peak_gib"] / theirs["peak_gib"]
        result["share_of_first_step"] = ours["first"]["seconds"] / theirs["first"]["seconds"]
        compiled = [side["first"]["compile_seconds"] for side in (ours, theirs)]
        result["share_of_compile_seconds"] = compiled[0] / compiled[1]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--peer-python")
    parser.add_argument(
        "--shared", action="store_true", help="a long prompt computed once for a group, and once a sample"
    )
    parser.add_argument("--whole-step", action="store_true", help="generate, score and update in one process")
    parser.add_argument("--trl-python", help="interpreter that has TRL, for --whole-step")
    args = parser.parse_args()
    speed = product_speed()
    results: dict[str, Any] = {
        "machine": {"cpus": os.cpu_count(), "load": os.getloadavg()[0], "python": platform.python_version()},
        "square_product_gf_per_cpu_second": speed,
    }
    for case in [name for name in args.cases.split(",") if name]:
        results[case] = compare(case, args.steps, args.peer_python)
        results[case]["share_of_product_speed"] = results[case]["gf_per_cpu_second"] / speed
        print(case, json.dumps(results[case]), file=sys.stderr, flush=True)
    ours = [sys.executable, "-W", "ignore", "-m", "benchmarks.trainer.whole_step"]
    if args.shared:
        results["shared"] = answer_of([*ours, "shared"])
        results["shared_typed"] = answer_of([*ours, "typed"])
    if args.whole_step:
        results["whole_step"] = {"upweight": answer_of([*ours, "step"])}
        if args.trl_python:
            theirs = answer_of([args.trl_python, str(HERE / "trl_side.py")])
            results["whole_step"]["trl"] = theirs
            cpu = theirs["cpu_seconds"] / results["whole_step"]["upweight"]["cpu_seconds"]
            results["whole_step"]["times_fewer_cpu_seconds"] = cpu
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
