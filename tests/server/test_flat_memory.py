"""Reports O1 to O5 for the server: what it holds does not grow with the batches that it has stored and trained."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil
import pytest
from server_harness import KEY, sample

SERVE = Path(__file__).with_name("serve_fake.py")
FULL, END = 350, 600  # batches after which SQLite's caches are full, and in all
MOST_GROWTH = 5_000_000  # bytes; 8 samples of a batch are 80 kB on the wire
TOKENS = 500


@pytest.mark.ci
def test_a_server_of_many_batches_keeps_its_size(tmp_path: Path) -> None:
    home, model = tmp_path / "home", tmp_path / "model"
    home.mkdir()
    model.mkdir()
    process = subprocess.Popen([sys.executable, str(SERVE), str(home)], stdout=subprocess.DEVNULL)
    try:
        while not (home / "server.json").exists():
            assert process.poll() is None
            time.sleep(0.05)
        url = json.loads((home / "server.json").read_text())["url"]
        with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {KEY}"}, timeout=30) as http:
            full = run(http, str(model), psutil.Process(process.pid))
        assert full[1] - full[0] < MOST_GROWTH
    finally:
        process.terminate()
        process.wait(20)


def run(http: httpx.Client, model: str, process: psutil.Process) -> list[int]:
    """Resident bytes after FULL and after END batches, each trained, with the calls of a page and an SDK between."""
    method = {"batch_size": 8, "num_batches": END, "checkpoint_every": 50}
    body = {"model": model, "method": {"type": "reinforcement", "reinforcement": method}}
    job = f"/v1alpha1/fine_tuning/jobs/{http.post('/v1/fine_tuning/jobs', json=body).raise_for_status().json()['id']}"
    many = {"token_ids": [1] * TOKENS, "logprobs": [-0.1] * TOKENS, "mask": [1] * TOKENS}
    sizes = []
    for index in range(END):
        http.post(f"{job}/batches", json={"index": index})
        own = {"task_id": f"t{index}", "reward": 0.5}
        samples = [sample(f"{index}-{i}", debug_info=own, **many) for i in range(8)]
        http.post(f"{job}/batches/{index}/samples", json={"samples": samples}).raise_for_status()
        for path in ("status", f"progress?since={index - 1}", "samples?limit=5", "waiting"):
            http.get(f"{job}/{path}").raise_for_status()
        if index + 1 in (FULL, END):
            while (http.get(f"{job}/status").json()["inference_version"] or 0) <= index:
                time.sleep(0.05)
            sizes.append(process.memory_info().rss)
    return sizes
