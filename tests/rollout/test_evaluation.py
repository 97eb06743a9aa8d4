import threading
import time

import pytest

from upweight.rollout import evaluation

from . import helpers


@pytest.fixture
def evaluated(api):
    from upweight.rollout import RolloutRunner

    def make(eval_fn, eval_every=None, **settings):
        return RolloutRunner(
            api,
            helpers.config(**settings),
            helpers.slow_rollout,
            helpers.Counting(),
            eval_dataset=[1, 2, 3],
            eval_every=eval_every,
            eval_fn=eval_fn,
        )

    return make


def test_both_ends_and_every_second_version(server, evaluated):
    """`job-methods.md`: every N batches and at both ends, without uploading samples."""
    seen = []

    def score(task, context):
        seen.append((server.version, task))
        return {"score": float(task), **({"rare": 1.0} if task == 2 else {})}

    summary = evaluated(score, eval_every=2, num_batches=4, allowed_staleness=-1).run()
    assert summary.evaluations == {
        0: {"score": 2.0, "rare": 1.0},
        2: {"score": 2.0, "rare": 1.0},
        4: {"score": 2.0, "rare": 1.0},
    }
    assert [m["batch_index"] for m in server.metrics] == [0, 2, 4]
    assert server.metrics[0]["metrics"] == {"score": 2.0, "rare": 1.0}
    assert sorted(seen)[:3] == [(0, 1), (0, 2), (0, 3)]
    assert len(server.samples()) == 16


async def async_score(task, context):
    return {"score": 1.0}


def test_failures_are_tolerated(server, evaluated):
    server.fail("/metrics", 404, {"detail": "not here"}, times=99)

    def score(task, context):
        if task == 1:
            raise ValueError
        return {"score": 1.0}

    assert evaluated(score).run().evaluations == {0: {"score": 1.0}, 3: {"score": 1.0}}
    assert evaluated(async_score, num_batches=4).run().evaluations == {3: {"score": 1.0}, 4: {"score": 1.0}}


def test_arguments_belong_together(evaluated):
    with pytest.raises(ValueError, match="eval_fn"):
        evaluated(None)
    with pytest.raises(ValueError, match="eval_every"):
        evaluated(async_score, eval_every=0)


def test_the_record_of_the_job_continues_after_a_resumption(server, evaluated):
    """Report P10: the job keeps the record, so a new process adds to the same one, in order."""

    def score(task, context):
        return {"score": float(server.version)}

    evaluated(score, eval_every=1, num_batches=2, allowed_staleness=-1).run()
    summary = evaluated(score, eval_every=1, num_batches=4, allowed_staleness=-1).run()
    assert [m["batch_index"] for m in server.metrics] == [0, 1, 2, 2, 3, 4]
    assert [m["metrics"]["score"] for m in server.metrics] == [0, 1, 2, 2, 3, 4]
    assert summary.started == 8


def test_a_last_version_that_never_comes_ends_the_run_without_it(server, evaluated, monkeypatch, caplog):
    monkeypatch.setattr(evaluation, "FINAL_VERSION_WAIT_S", 0.2)
    server.trains = False
    summary = evaluated(async_score, num_batches=1).run()
    assert (summary.reason, summary.evaluations) == ("all batches are filled", {0: {"score": 1.0}})
    assert "No last evaluation: version 1 was not served after 0 s" in caplog.text


def test_a_version_that_comes_during_an_evaluation_is_passed_over(server, evaluated):
    """The one after it is due again."""

    def score(task, context):
        if server.version == 1:
            server.version = 2
            time.sleep(0.1)  # the run sees it meanwhile
        return {"score": 1.0}

    server.trains = False
    server.version = 1
    runner = evaluated(score, eval_every=1, num_batches=3)
    threading.Timer(0.5, lambda: setattr(server, "version", 3)).start()
    assert sorted(runner.run().evaluations) == [1, 3]
