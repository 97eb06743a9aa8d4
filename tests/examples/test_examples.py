"""The examples and the quick start, end to end against the fake server."""

import os
import re
import subprocess
import sys
import textwrap
from functools import partial

import pytest
from openai.types.chat import ChatCompletion

from tests.fakes import JOB, FakeJobServer
from upweight.api_client import TokenFactory
from upweight.examples import basic, grpo, utils
from upweight.rollout import RolloutConfig, RolloutContext, RolloutRunner


@pytest.fixture
def server():
    texts = iter(range(10**6))
    with FakeJobServer(completion=lambda body: "42" if next(texts) % 2 else "41", reports_version=True) as fake:
        yield fake


@pytest.fixture
def context(server):
    with TokenFactory(server.url, "k") as client:
        made = RolloutContext(RolloutConfig(job_id=JOB, model_name="m", batch_size=4, num_samples_per_task=4), client)
        yield made
        made.close()


def completion(**changes) -> ChatCompletion:
    choice = {
        "index": 0,
        "finish_reason": "stop",
        "message": {"role": "assistant", "content": "42"},
        "logprobs": {"content": [{"token": "token_id:21", "logprob": -0.5, "bytes": None, "top_logprobs": []}]},
    }
    body = {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "prompt_token_ids": [7, 8]}
    return ChatCompletion.model_validate({**body, "choices": [{**choice, **changes}]})


def test_parse_completion():
    assert utils.parse_completion(completion()) == ([7, 8, 21], [0.0, 0.0, -0.5], [0, 0, 1])


@pytest.mark.parametrize(
    ("changes", "option"),
    [
        ({"logprobs": None}, "logprobs=True"),
        ({"logprobs": {"content": [{"token": "hi", "logprob": 0, "top_logprobs": []}]}}, "return_token_ids=True"),
    ],
)
def test_parse_completion_names_the_missing_option(changes, option):
    with pytest.raises(ValueError, match=option):
        utils.parse_completion(completion(**changes))
    bare = completion()
    del bare.model_extra["prompt_token_ids"]
    with pytest.raises(ValueError, match="return_token_ids=True"):
        utils.parse_completion(bare)


def test_group_advantages():
    assert utils.group_advantages([1.0, 0.0]) == pytest.approx([1.0, -1.0], abs=1e-5)
    assert utils.group_advantages([0.5, 0.5]) == [0.0, 0.0]


def test_call_concurrently_raises_the_error():
    with pytest.raises(ZeroDivisionError):
        utils.call_concurrently(lambda: 1 // 0, 2)


def test_grpo_asks_at_the_same_time(server, context):
    """Reports M10, M11, E9: each sample carries its own reward, normalised within its own group."""
    server.inference_delay = 0.2
    group = grpo.roll_out_task(grpo.Task("?", "42"), context, grpo.MyConfig())
    assert server.inference_peak == 4
    assert sorted(s.debug_info["reward"] for s in group.samples) == [0.0, 0.0, 1.0, 1.0]
    assert sum(s.normalized_reward for s in group.samples) == pytest.approx(0)
    assert group.samples[0].debug_info["inference_version"] == 0


def test_grpo_rejects_equal_rewards(server, context):
    """Failure D9."""
    server.completion = lambda body: "42"
    assert grpo.roll_out_task(grpo.Task("?", "42"), context, grpo.MyConfig()).is_rejected
    kept = grpo.roll_out_task(grpo.Task("?", "42"), context, grpo.MyConfig(reject_equal_rewards=False))
    assert [s.normalized_reward for s in kept.samples] == [0.0] * 4


@pytest.mark.parametrize("executor", ["thread", "process"])
def test_grpo_end_to_end(server, executor):
    config = RolloutConfig(
        job_id=JOB,
        model_name="m",
        batch_size=4,
        num_batches=2,
        num_samples_per_task=2,
        max_concurrency=4,
        executor_type=executor,
        status_polling_interval=0.05,
    )
    with TokenFactory(server.url, "k") as client:
        server.completion = alternating()
        RolloutRunner(client, config, partial(grpo.roll_out_task, my_config=grpo.MyConfig()), grpo.Dataset()).run()
    assert server.sizes() == {0: 4, 1: 4}
    assert server.worst_staleness() <= 0


def alternating():
    texts = iter(range(10**6))
    answers = [str(n) for n in range(2, 41)]
    return lambda body: " ".join(answers) if next(texts) % 2 else "no idea"


@pytest.mark.parametrize("module", ["basic", "grpo"])
def test_modules_run_from_the_environment(server, module):
    server.batch_size = 4
    server.completion = alternating()
    env = {
        **os.environ,
        "TOKENFACTORY_BASE_URL": server.url,
        "TOKENFACTORY_API_KEY": "k",
        "TOKENFACTORY_ROLLOUT_JOB_ID": JOB,
        "TOKENFACTORY_ROLLOUT_BATCH_SIZE": "4",
        "TOKENFACTORY_ROLLOUT_STATUS_POLLING_INTERVAL": "0.05",
    }
    command = [sys.executable, "-m", f"upweight.examples.{module}"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "batches_filled=2" in done.stdout
    assert server.sizes() == {0: 4, 1: 4}


ENVIRONMENT = {
    "TOKENFACTORY_BASE_URL": "http://127.0.0.1:9",
    "TOKENFACTORY_API_KEY": "k",
    "TOKENFACTORY_ROLLOUT_JOB_ID": JOB,
}


def set_environment(monkeypatch, **changes):
    """The three variables, with changes; None takes one away."""
    for name, value in {**ENVIRONMENT, **changes}.items():
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)


@pytest.mark.parametrize("example", [basic, grpo])
@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"TOKENFACTORY_API_KEY": None}, "TOKENFACTORY_API_KEY is not set; export it; `upweight jobs create` prints"),
        ({"TOKENFACTORY_API_KEY": " "}, "TOKENFACTORY_API_KEY is not set"),
        ({"TOKENFACTORY_BASE_URL": None}, "TOKENFACTORY_BASE_URL is not set; export it"),
        ({"TOKENFACTORY_BASE_URL": "host"}, "TOKENFACTORY_BASE_URL: base_url 'host' needs a scheme and a host"),
        ({"TOKENFACTORY_ROLLOUT_JOB_ID": None}, "TOKENFACTORY_ROLLOUT_JOB_ID is not set; export it"),
        ({"TOKENFACTORY_ROLLOUT_BATCH_SIZE": "many"}, "TOKENFACTORY_ROLLOUT_BATCH_SIZE is 'many': Input should be a"),
        (
            {"TOKENFACTORY_ROLLOUT_UPLOAD_TIMEOUT": "nan"},
            "TOKENFACTORY_ROLLOUT_UPLOAD_TIMEOUT is 'nan': upload_timeout",
        ),
        ({"MAX_TOKENS": "few"}, "MAX_TOKENS is 'few': Input should be a valid integer"),
    ],
)
def test_what_is_missing_is_one_line_with_the_remedy(monkeypatch, capsys, example, changes, line):
    set_environment(monkeypatch, **changes)
    monkeypatch.setattr(sys, "argv", ["example"])
    with pytest.raises(SystemExit) as ended:
        example.main()
    assert ended.value.code == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(f"error: {line}")


def test_a_run_that_fails_is_one_line(monkeypatch, capsys, server):
    server.status_extra = {"job_status": "failed", "error": {"message": "out of memory"}}
    set_environment(monkeypatch, TOKENFACTORY_BASE_URL=server.url)
    monkeypatch.setattr(sys, "argv", ["example"])
    with pytest.raises(SystemExit) as ended:
        basic.main()
    assert ended.value.code == 1
    assert re.fullmatch(r"error: Job .* failed: .*out of memory.*\n", capsys.readouterr().err)


def bare_environment():
    return {name: value for name, value in os.environ.items() if not name.startswith("TOKENFACTORY_")}


@pytest.mark.parametrize("module", ["basic", "grpo", "math"])
def test_help_needs_no_settings_and_says_what_to_set(module):
    command = [sys.executable, "-W", "error", "-m", f"upweight.examples.{module}", "--help"]
    done = subprocess.run(command, env=bare_environment(), capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "--help" in done.stdout


QUICK_START = textwrap.dedent("""
    from dataclasses import dataclass
    from functools import partial
    from random import choices

    from pydantic_settings import BaseSettings

    from upweight.api_client import TokenFactory
    from upweight.examples.utils import parse_completion
    from upweight.rollout import RolloutConfig, RolloutContext, RolloutRunner
    from upweight.rollout.models import Sample, SampleGroup

    @dataclass
    class Task:
        question: str
        answer: str

    class Dataset:
        def __init__(self):
            self._tasks = [Task(question="Name a number.", answer="42")]

        def sample(self, n_samples: int) -> list[Task]:
            return choices(self._tasks, k=n_samples)

    class MyConfig(BaseSettings):
        system_prompt: str = "Answer only."

    def roll_out_task(task: Task, context: RolloutContext, my_config: MyConfig) -> SampleGroup:
        completion = context.openai_client.chat.completions.create(
            model=context.config.model_name,
            messages=[
                {"role": "system", "content": my_config.system_prompt},
                {"role": "user", "content": task.question},
            ],
            extra_body={"return_token_ids": True, "logprobs": True},
        )
        token_ids, logprobs, mask = parse_completion(completion)
        response = completion.choices[0].message.content
        assert response is not None
        reward = float(response.strip() == task.answer)
        return SampleGroup(
            samples=[Sample(token_ids=token_ids, logprobs=logprobs, mask=mask, normalized_reward=reward)]
        )

    runner = RolloutRunner(
        api_client=TokenFactory(),
        config=RolloutConfig(
            job_id="job-1",
            model_name="Qwen/Qwen2.5-1.5B-Instruct",
            batch_size=4,
            num_batches=2,
            num_samples_per_task=1,
            max_concurrency=32,
            allowed_staleness=0,
        ),
        dataset=Dataset(),
        rollout_fn=partial(roll_out_task, my_config=MyConfig()),
    )
    runner.run()
""")


def test_quick_start(server, tmp_path):
    """Failure P3: the script of a first reader."""
    script = tmp_path / "quick_start.py"
    script.write_text(QUICK_START)
    env = {**os.environ, "TOKENFACTORY_BASE_URL": server.url, "TOKENFACTORY_API_KEY": "k"}
    done = subprocess.run(
        [sys.executable, str(script)], env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert server.sizes() == {0: 4, 1: 4}
