"""SIGKILL of the SDK process, a grader, the worker or the API process at random moments, many times; then the run ends as planned.

Nothing accepted is lost or doubled, `inference_version` never falls, the planned batches are trained, the ledger adds up.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.e2e.conftest import BATCH, GROUP, Site
from upweight.demo.server_process import ServerProcess

ENDED = ("succeeded", "failed", "cancelled")
ACTS = ("sdk", "grader", "worker", "server", "freeze")


class Torture:
    """A job, a rollout process that is started again whenever it is gone, and something that kills."""

    def __init__(self, site: Site, seed: int, batches: int) -> None:
        self.site = site
        self.batches = batches
        self.random = random.Random(seed)
        self.job_id = site.create(
            lora={"rank": 4}, learning_rate=1e-2, num_batches=batches, checkpoint_every=2, keep_checkpoints=2
        )
        self.sdk: subprocess.Popen[bytes] | None = None
        self.seen: list[int] = []
        self.told: list[str] = []
        self._over = threading.Event()
        self._watcher = threading.Thread(target=self._watch)

    def __enter__(self) -> Torture:
        self._watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._watcher.join()
        if self.sdk is not None:
            self.sdk.kill()
            self.sdk.wait()

    def progress(self) -> dict[str, Any] | None:
        try:
            return self.site.progress(self.job_id)
        except (httpx.HTTPError, OSError):  # the server is dead or coming up
            return None

    def keep_going(self) -> None:
        """Start again what is gone."""
        if self.site.server.ended() is not None:
            self.site.server.stop()
            self.site.restart()
            if self.sdk is not None:  # it knows the old port only
                self.sdk.kill()
                self.sdk.wait()
        if self.sdk is None or self.sdk.poll() is not None:
            server, log = self.site.server, self.site.home / "logs" / "sdk.log"
            arguments = [server.url, server.key, self.job_id, self.site.model, self.batches, BATCH, GROUP]
            command = [
                sys.executable,
                "-m",
                "tests.e2e.sdk_process",
                *map(str, arguments),
                str(self.site.home / "spool"),
            ]
            with log.open("ab") as output:
                self.sdk = subprocess.Popen(command, stdout=output, stderr=output)

    @property
    def kills(self) -> int:
        return len(self.told) - self.told.count("freeze")

    def strike(self) -> None:
        """At one of the processes; at none if that one does not live just now."""
        act = self.random.choice(ACTS)
        if (pid := self._victim(act)) is None:
            return
        try:
            if act == "freeze":
                os.kill(pid, signal.SIGSTOP)
                time.sleep(1.0)
                os.kill(pid, signal.SIGCONT)
            else:
                os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:  # it ended meanwhile
            return
        self.told.append(act)

    def _victim(self, act: str) -> int | None:
        if act == "server":
            return self.site.server.pid if self.site.server.ended() is None else None
        if act in ("sdk", "grader"):
            if self.sdk is None or self.sdk.poll() is not None:
                return None
            return self.sdk.pid if act == "sdk" else self._grader(self.sdk.pid)
        pid: int | None = ((self.progress() or {}).get("worker") or {}).get("pid")
        return pid

    def _grader(self, sdk: int) -> int | None:
        try:
            children = psutil.Process(sdk).children()
            found = [child.pid for child in children if "spawn_main" in " ".join(child.cmdline())]
        except psutil.Error:  # it ended meanwhile
            return None
        return self.random.choice(found) if found else None

    def await_version(self, seconds: float) -> None:
        """Let the job get on by one version, so that the next kill meets another moment of its life."""
        end, before = time.monotonic() + seconds, max(self.seen, default=-1)
        while max(self.seen, default=-1) <= before and time.monotonic() < end:
            self.keep_going()
            time.sleep(0.1)

    def finish(self, seconds: float) -> dict[str, Any]:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            now = self.progress()
            if now is not None and now["job_status"] in ENDED:
                return now
            self.keep_going()
            time.sleep(0.2)
        raise AssertionError(f"not at the end after {seconds} s: {now}, {self.told}")

    def _watch(self) -> None:
        while not self._over.wait(0.05):
            version = (self.progress() or {}).get("inference_version")
            if version is not None:
                self.seen.append(version)


def run_under_fire(site: Site, seed: int, kills: int, batches: int) -> None:
    with Torture(site, seed, batches) as torture:
        while torture.kills < kills:
            torture.keep_going()
            time.sleep(torture.random.uniform(0.1, 3.0))
            torture.strike()
            if torture.random.random() < 0.5:
                torture.await_version(seconds=20)
            if (torture.progress() or {}).get("job_status") in ENDED:
                break
        job = torture.finish(seconds=150 + 5 * batches)
    assert job["job_status"] == "succeeded", (job["reason"], torture.told)
    assert torture.kills >= kills, torture.told
    stale = [v["metrics"]["staleness_max"] for v in job["versions"][1:] if "staleness_max" in v["metrics"]]
    print(
        json.dumps(
            {"struck": Counter(torture.told), "batches": batches, "ledger": job["ledger"], "staleness_max": max(stale)}
        )
    )
    assert job["version"] == job["filled_batches"] == batches
    assert [v["version"] for v in job["versions"]] == list(range(batches + 1))
    assert torture.seen == sorted(torture.seen)
    assert max(stale) <= 1
    _check_ledger(site.home, job, batches)


def _check_ledger(home: Path, job: dict[str, Any], batches: int) -> None:
    ledger = job["ledger"]
    fates = ("trained", "zero_advantage", "masked", "stale", "refused", "not_yet_trained")
    assert ledger["accepted"] == batches * BATCH == sum(ledger[fate] for fate in fates)
    assert ledger["not_yet_trained"] == 0
    with sqlite3.connect(home / "store.sqlite3") as store:
        rows = store.execute("SELECT count(*), count(DISTINCT id) FROM samples")
        assert rows.fetchone() == (batches * BATCH, batches * BATCH)
        sizes = {row[0] for row in store.execute("SELECT count(*) FROM samples GROUP BY batch_index")}
    store.close()
    assert sizes == {BATCH}


@pytest.fixture
def patient_site(tmp_path: Path, tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """A server that does not give a job up however often its worker is killed."""
    monkeypatch.setenv("UPWEIGHT_MAX_RESTARTS", "1000")
    monkeypatch.setenv("UPWEIGHT_RESTART_BACKOFF", "0")
    running = Site(tmp_path / "home", str(tiny_model_folder), ServerProcess(tmp_path / "home"))
    yield running
    running.server.stop()


@pytest.mark.ci
def test_five_random_kills(patient_site: Site) -> None:
    run_under_fire(patient_site, seed=1, kills=5, batches=40)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(3))
def test_fifty_random_kills(patient_site: Site, seed: int) -> None:
    run_under_fire(patient_site, seed=seed, kills=50, batches=400)
