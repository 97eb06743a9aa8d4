"""The screens as text: what stands where, and that a terminal of 80 columns holds it."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest

from upweight.cli.columns import age, bar, fields, table
from upweight.cli.connection import Place
from upweight.cli.job_screens import created_lines, end_line, list_lines, show_lines, state_line, version_line
from upweight.cli.screen import print_lines, styled

ID = "ftjob-0123456789abcdef01234567"
NOW = 1_000_000.0


def job(**changes: Any) -> dict[str, Any]:
    method = {"algorithm": "grpo", "learning_rate": 1e-5, "lora": {"rank": 4}}
    return {
        "id": ID,
        "status": "running",
        "job_status": "waiting_for_samples",
        "created_at": NOW - 200,
        "model": "/models/tiny",
        "suffix": "first",
        "training_method": {"reinforcement": method},
        "trained_steps": 2,
        "total_steps": 5,
        "batch_size": 4,
        **changes,
    }


def version(number: int, **changes: Any) -> dict[str, Any]:
    measured = {"reward_mean": 0.375, "loss": -0.01234, "mismatch_max": 9.5e-7, "samples_trained": 4.0}
    return {
        "version": number,
        "created_at": NOW,
        "fingerprint": f"{number:032x}"[::-1],
        "update_skipped": False,
        "seconds": 7.43 if number else 0.0,
        "checkpoint": None,
        "metrics": measured if number else {},
        **changes,
    }


def progress(**changes: Any) -> dict[str, Any]:
    ledger = {"accepted": 11, "trained": 6, "zero_advantage": 2, "masked": 0, "stale": 0, "refused": 0}
    return {
        "job_status": "waiting_for_samples",
        "reason": "batch 2 holds 3 of 4 samples",
        "error": None,
        "version": 2,
        "inference_version": 2,
        "filled_batches": 2,
        "total_batches": 5,
        "batch_size": 4,
        "in_batch": 3,
        "versions": [version(0), version(1), version(2, update_skipped=True, checkpoint="/x")],
        "client_metrics": [{"batch_index": i, "metrics": {"accuracy": 0.2 + i / 10}} for i in range(3)],
        "ledger": {**ledger, "not_yet_trained": 3, "unmatched": 1, "filtered": 0},
        "weights": None,
        "worker": {"pid": 12, "phase": "ready", "tokens_per_second": 130.4, "peak_memory_bytes": 1_234_000_000},
        **changes,
    }


def test_show() -> None:
    lines = show_lines(job(), progress(), NOW, width=80)
    created = next(line for line in lines if line.startswith("created"))
    assert created.endswith(", 3 min ago")
    lines.remove(created)
    assert lines == [
        f"{ID}  waiting_for_samples",
        "reason   batch 2 holds 3 of 4 samples",
        "model    /models/tiny",
        "suffix   first",
        "method   grpo, learning rate 1e-05, LoRA rank 4",
        "batches  2 of 5 filled, next ██████████████████░░░░░░ 3/4 samples",
        "version  2 is served",
        "samples  11 accepted = 6 trained + 2 zero advantage + 3 not yet trained; 1",
        "         unmatched",
        "scores   batch 0: accuracy 0.2 → batch 2: accuracy 0.4",
        "worker   process 12, ready, 130 tokens/s, 1.2 GB at most",
        "",
        "VERSION  REWARD      LOSS  MISMATCH  SAMPLES  SECONDS  FINGERPRINT",
        "      0       -         -         -        -        -  000000000000",
        "      1   0.375  -0.01234   9.5e-07        4      7.4  100000000000",
        "      2   0.375  -0.01234   9.5e-07        4      7.4  200000000000  skipped saved",
    ]


def test_show_of_a_failed_job_names_the_error() -> None:
    error = {"code": "worker_died", "message": "the worker ended 4 times " + 20 * "again ", "param": None}
    failed = progress(job_status="failed", error=error, worker=None, versions=[], inference_version=None)
    text = "\n".join(show_lines(job(), failed, NOW, width=80))
    assert "(worker_died)" in text
    assert "none is served yet" in text
    assert max(len(line) for line in text.splitlines()) <= 80
    assert "2 of 5 filled\n" in text


def test_old_versions_are_counted_not_shown() -> None:
    many = progress(versions=[version(n) for n in range(30)])
    lines = show_lines(job(), many, NOW, most_versions=20)
    assert lines[-1] == "and 10 older versions (--all)"
    assert lines[-2].startswith("     29 ")
    assert len(show_lines(job(), many, NOW)) == len(lines) + 10 - 1


def test_list() -> None:
    jobs = [job(), job(id="x", job_status="queued", total_steps=None, trained_steps=0, created_at=NOW, model="m")]
    assert list_lines(jobs, NOW) == [
        "JOB                             STATUS               TRAINED    AGE  MODEL",
        f"{ID}  waiting_for_samples      2/5  3 min  tiny",
        "x                               queued                   0/∞    0 s  m",
    ]
    long = [job(model="HuggingFaceTB/SmolLM2-135M-Instruct")]
    assert max(map(len, list_lines(long, NOW, width=80))) == 80
    assert list_lines(long, NOW)[1].endswith("HuggingFaceTB/SmolLM2-135M-Instruct")


def test_lines_of_the_watch() -> None:
    assert state_line(progress()) == "waiting_for_samples  batch 2 holds 3 of 4 samples"
    told = "version 1            reward 0.375  loss -0.01234  mismatch 9.5e-07  7.4 s  100000000000"
    assert version_line(version(1)) == told
    assert version_line(version(0)) == "version 0            000000000000"
    over = progress(job_status="succeeded", reason="all 2 batches are trained", weights="/w")
    assert end_line(over) == "succeeded            all 2 batches are trained; weights: /w"


@pytest.mark.parametrize("source", ["file", "environment", "option", "shown"])
def test_the_lines_of_a_new_job_are_a_shell_script(tmp_path: Any, source: str) -> None:
    file = tmp_path / "it's the key"
    file.write_text("secret\n")
    origin = {"file": str(file), "environment": "TOKENFACTORY_API_KEY", "option": "--key", "shown": "--key"}[source]
    place = Place(url="http://127.0.0.1:8000", url_from="--url", key="secret", key_from=origin)
    lines = created_lines(job(), place, show_key=source == "shown")
    assert ("secret" in "\n".join(lines)) is (source == "shown")
    script = "\n".join([*lines, 'echo "$TOKENFACTORY_BASE_URL $TOKENFACTORY_API_KEY $TOKENFACTORY_ROLLOUT_JOB_ID"'])
    environment = {"PATH": "/bin:/usr/bin"} | ({"TOKENFACTORY_API_KEY": "secret"} if source == "environment" else {})
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False, env=environment)
    if source == "option":  # the shell does not know it: said, not guessed
        assert "give the key of --key here" in done.stderr
    else:
        assert done.stdout == f"http://127.0.0.1:8000 secret {ID}\n"


def test_small_formats() -> None:
    assert [age(s) for s in (-1, 59, 60, 7200, 200_000)] == ["0 s", "59 s", "1 min", "2 h", "2 d"]
    assert (bar(0, 0, 4), bar(1, 2, 4), bar(9, 2, 4)) == ("░░░░", "██░░", "████")
    assert table(("A", "B"), [("x", "10"), ("yy", "9")], right=("B",)) == ["A    B", "x   10", "yy   9"]
    assert fields([("a", "one two three four five"), ("none", "")], width=16) == ["a  one two three four", "   five"]


def test_colours_change_no_letter() -> None:
    lines = show_lines(job(), progress(), NOW)
    assert styled(lines).plain == "\n".join(lines)
    assert styled(lines).spans


def test_names_of_others_steer_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    lines = show_lines(job(suffix="a\x1b[2J\nb\u202ec\ud800", model="é 模型 😀"), progress(), NOW)
    print_lines(lines)
    told = capsys.readouterr().out
    assert "suffix   a�[2J�b�c�\n" in told
    assert "model    é 模型 😀\n" in told
    assert styled(lines).plain == told[:-1]
