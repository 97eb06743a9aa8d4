"""Micro-batches from the free memory, in numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
from server_harness import Running, Start

from upweight.server.supervision.memory import keeps_start, microbatch_tokens, shortage

GB = 10**9


@pytest.mark.parametrize(
    ("free", "model", "lora", "tokens"),
    [
        (24 * GB, GB // 2, False, 8192),
        (8 * GB, GB // 2, False, 4096),  # (5.6 − 2.5) GB / 512 KiB = 5912
        (8 * GB, GB // 2, True, 8192),  # (5.6 − 1.0) GB / 512 KiB = 8773
        (6 * GB, GB // 2, False, 2048),
        (GB, GB // 2, False, 512),
        (0, 0, False, 512),
    ],
)
def test_powers_of_two_by_free_memory(tmp_path: Path, free: int, model: int, lora: bool, tokens: int) -> None:
    file = tmp_path / "model.safetensors"
    with file.open("wb") as handle:
        handle.truncate(model)
    assert microbatch_tokens(free, tmp_path, lora=lora) == tokens


def test_a_start_model_that_is_kept_takes_room_too(tmp_path: Path) -> None:
    with (tmp_path / "model.safetensors").open("wb") as handle:
        handle.truncate(GB // 2)
    kept = [microbatch_tokens(7 * GB, tmp_path, lora=lora, keeps_start=True) for lora in (False, True)]
    assert kept == [2048, 4096]  # (4.9 − 3.0) GB / 512 KiB = 3623; an adapter's base is the start model
    assert microbatch_tokens(7 * GB, tmp_path, lora=False) == 4096  # (4.9 − 2.5) GB / 512 KiB = 4577


def test_the_start_model_counts_where_a_trainer_keeps_it() -> None:
    assert keeps_start("reinforcement", {"beta": 0.1, "algorithm": "ppo"})
    assert keeps_start("dpo", {"beta": 0.1, "loss_type": "ipo"})
    assert not keeps_start("reinforcement", {"beta": 0.0})
    assert not keeps_start("dpo", {"beta": 0.1, "loss_type": "simpo"})  # needs no reference
    assert not keeps_start("supervised", {})


def test_the_choice_is_stored_with_the_job(start: Start) -> None:
    server = start()
    job = server.create_job()
    server.wait(job, lambda p: p["inference_version"] == 0)
    chosen = server.http.get(f"/v1/fine_tuning/jobs/{job}").json()["training_method"]["reinforcement"]
    assert chosen["microbatch_tokens"] in {2**power for power in range(9, 14)}
    own = server.create_job(microbatch_tokens=100)
    kept = server.http.get(f"/v1/fine_tuning/jobs/{own}").json()["training_method"]["reinforcement"]
    assert kept["microbatch_tokens"] == 100


def test_a_job_fits_beside_what_the_others_may_grow_to() -> None:
    assert shortage(99 * GB, [], free=0, limit=None) is None, "a job that is alone tries"
    # 70 % of 10 GB, of which the other one will still take 4 - 1
    assert shortage(4 * GB, [(4 * GB, GB)], free=10 * GB, limit=None) is None
    told = shortage(5 * GB, [(4 * GB, GB)], free=10 * GB, limit=None)
    assert told == "waits for memory: it needs about 5.00 GB, 4.00 GB are left"
    assert shortage(5 * GB, [(GB, 6 * GB)], free=0, limit=11 * GB) is None
    assert shortage(5 * GB, [(GB, 6 * GB)], free=99 * GB, limit=10 * GB) is not None


def test_jobs_run_together_as_far_as_their_memory_goes_and_none_overtakes(start: Start) -> None:
    server = start(max_running=3, memory_gb=0.6)  # each needs 512 KiB for each of 512 tokens
    first, second = server.create_job(), server.create_job()
    for job in (first, second):
        server.wait(job, lambda p: p["inference_version"] == 0)
    large, small = server.create_job(microbatch_tokens=600), server.create_job(microbatch_tokens=1)
    needs = "waits for memory: it needs about 0.31 GB, 0.06 GB are left"
    server.wait(large, lambda p: p["reason"] == f"{needs}; running: {first}, {second}")
    server.wait(small, lambda p: p["reason"] == f"waits for a place; running: {first}, {second}")
    assert server.http.get(server.rl(large, "waiting")).json()["headline"] == "W" + needs[1:]
    end(server, first)
    server.wait(large, lambda p: p["inference_version"] == 0)
    server.wait(small, lambda p: p["inference_version"] == 0)


def end(server: Running, job: str) -> None:
    assert server.http.post(f"/v1/fine_tuning/jobs/{job}/cancel").status_code == 200
