"""Random runs with rejections, failures, lost answers, refused calls and a second party filling the same batches."""

import random
import threading
import time

import pytest
import tenacity

from tests.fakes import FakeJobServer, Fault, Reply
from upweight.api_client import TokenFactory
from upweight.rollout import RolloutRunner, uploader
from upweight.rollout.models import SampleGroup

from . import helpers


def trouble(server, n_batches, has_company):
    """A rollout function that makes trouble at random."""

    def rollout(task, context):
        luck = random.random()
        time.sleep(random.random() * 0.02)
        if luck < 0.1:
            raise ValueError("no luck")
        if luck < 0.2:
            return SampleGroup(is_rejected=True)
        if luck < 0.23:
            return None
        if luck < 0.4:
            reply = Reply(random.choice([500, 502, 429]), {})
            suffix, times = random.choice(["/samples", "/status", "/batches"]), random.randint(1, 6)
            server.faults.append(Fault(suffix, reply, times=times, stored=random.random() < 0.5))
        if has_company and luck > 0.93:
            with server.lock:
                k = server.filled
                if k < n_batches:
                    server.put_samples(k, random.randint(1, server.batch_size - len(server.batches.get(k, []))))
        return helpers.rollout(task, context)

    return rollout


def run_once(seed, monkeypatch):
    monkeypatch.setattr(uploader, "FIRST_WAIT_S", 0.02)
    rng = random.Random(seed)
    G, N, S = rng.choice([1, 2, 3]), rng.randint(1, 5), rng.choice([None, -1, 0, 1, 2])
    B, present, has_company = G * rng.randint(1, 4), rng.randint(0, G - 1), rng.random() < 0.4
    wait = tenacity.wait_fixed(0.005)
    with FakeJobServer(batch_size=B) as server, TokenFactory(server.url, "k", tenacity_retry_wait=wait) as api:
        server.put_samples(0, present)
        settings = helpers.config(
            batch_size=B,
            num_batches=N,
            num_samples_per_task=G,
            max_concurrency=G * rng.randint(1, 4),
            allowed_staleness=S,
            drop_stale_trajectories=rng.random() < 0.4,
            num_rollout_retries=rng.choice([0, 1]),
            status_polling_interval=0.01,
            rollout_retry_backoff=0.01,
        )
        runner = RolloutRunner(api, settings, trouble(server, N, has_company), helpers.Counting())
        watchdog = threading.Timer(30, runner.stop)
        watchdog.start()
        summary = runner.run()
        watchdog.cancel()
        assert server.sizes() == dict.fromkeys(range(N), B), summary
        assert summary.started == summary.fates
        assert summary.unsent_samples == 0
        assert S is None or server.worst_staleness() <= S
        if not has_company and not settings.drop_stale_trajectories:
            assert summary.dropped_stale == summary.dropped_samples == 0


@pytest.mark.parametrize("seed", range(10))
def test_random_faults(seed, monkeypatch):
    """Failures H1, H2, H4, D1, D2, D5, X10, all at once."""
    run_once(seed, monkeypatch)


@pytest.mark.soak
def test_many_random_faults(monkeypatch):
    for seed in range(10, 400):
        run_once(seed, monkeypatch)
