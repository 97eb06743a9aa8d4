"""The mathematics example: scoring with literal answers, drawing, and a run against the fake server."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.fakes import JOB, FakeJobServer
from upweight.api_client import TokenFactory
from upweight.examples import math as example
from upweight.rollout import RolloutConfig, RolloutContext, RolloutRunner

ROWS = [{"question": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(5)]


@pytest.mark.parametrize(
    ("response", "answer", "reward"),
    [
        ("So \\boxed{42}.", "42", 1.0),
        ("So \\boxed{42}.", "41", 0.0),
        ("So 42.", "42", -1.0),
        ("So \\boxed{42", "42", -1.0),
        ("So \\boxed{}", "42", -1.0),
        ("\\boxed{1} or \\boxed{42}", "42", -1.0),
        ("\\boxed{\\frac{1}{2}}", "0.5", 1.0),
        ("\\boxed{\\dfrac{-3}{4}}", "-3/4", 1.0),
        ("\\boxed{1,234}", "1234", 1.0),
        ("\\boxed{$x^{2}+1$}", "x^{2} + 1", 1.0),
        ("\\boxed{\\frac{1}{0}}", "0", 0.0),
        ("\\boxed{1e999999999}", "1", 0.0),
        ("\\boxed{" + "9" * 100_000 + "}", "1", 0.0),
        ("\\boxed{" * 2000, "1", -1.0),
    ],
)
def test_reward(response: str, answer: str, reward: float) -> None:
    assert example.reward_fn(response, answer) == reward


def test_defaults_are_the_contract() -> None:
    settings = example.MathExampleConfig()
    assert (example.DEFAULT_DATASET_PATH, example.DEFAULT_DATASET_SPLIT) == ("antonpl/math-dapo-25k", "train")
    assert (settings.fewshot, settings.temperature, settings.top_p, settings.max_tokens) == (True, 1.0, 1.0, 2048)
    assert (settings.reject_equal_rewards, settings.dataset_seed, settings.with_replacement) == (True, 0, True)


def test_messages_end_with_the_question_and_may_begin_with_a_solved_one() -> None:
    assert example.build_messages("Why?", fewshot=False) == [
        {"role": "user", "content": "Why?" + example.QUESTION_SUFFIX}
    ]
    assert example.build_messages("Why?")[:-1] == example.standard_fewshot_prefix()
    assert example.check_format(example.standard_fewshot_prefix()[-1]["content"])


def test_with_replacement_really_means_that_and_more_than_all_rows_may_be_asked() -> None:
    """Failure D9."""
    drawn = example.MathDAPODataset(ROWS).sample(200)
    counts = Counter(task.question for task in drawn)
    assert len(counts) == 5
    first = [task.question for task in drawn[:5]]
    assert len(set(first)) < 5 or len({t.question for t in drawn[5:10]}) < 5  # no pass through all rows
    without = example.MathDAPODataset(ROWS, with_replacement=False).sample(10)
    assert set(Counter(task.question for task in without).values()) == {2}


@pytest.mark.parametrize("with_replacement", [True, False])
def test_the_order_depends_on_the_seed_and_is_restored(with_replacement: bool) -> None:
    make = partial(example.MathDAPODataset, ROWS, with_replacement=with_replacement)
    first, again, other = make(seed=1), make(seed=1), make(seed=2)
    whole = first.sample(20)
    assert again.sample(20) == whole != other.sample(20)
    again.restore({"position": 7})
    assert again.sample(13) == whole[7:]


def test_other_shapes_of_rows() -> None:
    chat = {"prompt": [{"role": "user", "content": "Q"}], "reward_model": {"ground_truth": "7"}}
    assert example.MathDAPODataset([chat]).sample(1) == [example.MathTask("Q", "7")]
    with pytest.raises(ValueError, match=r"columns text; it needs one of question, problem"):
        example.MathDAPODataset([{"text": "x"}]).sample(1)
    with pytest.raises(ValueError, match="empty"):
        example.MathDAPODataset([])


def test_a_run_skips_groups_without_variance() -> None:
    """Failure D9."""
    turns = iter(range(10**6))

    def completion(body: dict) -> str:
        n = next(turns)
        return "\\boxed{0}" if n < 8 or n % 2 else "nothing"  # the first two groups are all equal

    with FakeJobServer(completion=completion) as server, TokenFactory(server.url, "k") as client:
        config = RolloutConfig(
            job_id=JOB, model_name="m", batch_size=4, num_samples_per_task=4, num_batches=2, max_concurrency=4
        )
        rollout = partial(example.roll_out_task, math_config=example.MathExampleConfig())
        rows = [{"question": "What is 0 + 0?", "answer": "0"}]
        summary = RolloutRunner(client, config, rollout, example.MathDAPODataset(rows)).run()
        assert (summary.batches_filled, summary.rejected) == (2, 2)
        bodies = [r.body for r in server.requests if r.path.endswith("/chat/completions")]
        assert {(b["temperature"], b["top_p"], b["max_tokens"]) for b in bodies} == {(1.0, 1.0, 2048)}
        keep = example.MathExampleConfig(reject_equal_rewards=False)
        context = RolloutContext(config, client)
        server.completion = lambda body: "\\boxed{0}"
        group = example.roll_out_task(example.MathTask("?", "0"), context, keep)
        assert [s.normalized_reward for s in group.samples] == [0.0] * 4
        context.close()


def test_the_command_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def error(*arguments: str) -> str:
        result = CliRunner().invoke(example.main, arguments)
        assert result.exit_code == 2
        return result.output

    for name in ("BASE_URL", "API_KEY", "ROLLOUT_JOB_ID"):
        monkeypatch.delenv(f"TOKENFACTORY_{name}", raising=False)
    assert error() == "error: TOKENFACTORY_BASE_URL is not set; export it; `upweight jobs create` prints the line\n"
    monkeypatch.setenv("TOKENFACTORY_BASE_URL", "http://127.0.0.1:9")
    assert error().startswith("error: TOKENFACTORY_API_KEY is not set")
    monkeypatch.setenv("TOKENFACTORY_API_KEY", "k")
    assert error().startswith("error: TOKENFACTORY_ROLLOUT_JOB_ID is not set")
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert error("--job-id", "j").endswith("pip install datasets\n")
    assert "--no-replacement" in CliRunner().invoke(example.main, ["--help"]).output


def test_it_hides_no_standard_module_when_imported_or_tested_in_place() -> None:
    """Failure P4: neither as a module nor under pytest does `import math` find the example."""
    code = "import math, upweight.examples.math; assert math.sqrt(4) == 2"
    subprocess.run([sys.executable, "-c", code], check=True)
    folder = Path(example.__file__).parent
    assert str(folder) not in sys.path
