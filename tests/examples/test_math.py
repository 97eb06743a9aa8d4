"""The mathematics example: answers, formats, the data set, and a run against the fake server."""

import subprocess
import sys
from functools import partial

import pytest
from click.testing import CliRunner

from tests.fakes import JOB, FakeJobServer
from upweight.api_client import TokenFactory
from upweight.examples import math as example
from upweight.rollout import RolloutConfig, RolloutRunner

ROWS = [{"question": f"What is {i} + {i}?", "answer": str(2 * i)} for i in range(5)]


@pytest.mark.parametrize(
    ("response", "answer", "reward"),
    [
        ("so \\boxed{42}", "42", 1.0),
        ("first \\boxed{1}, then \\boxed{42}.", "42", 1.0),
        ("\\boxed{42.0}", "42", 1.0),
        ("\\boxed{1,000}", "1000", 1.0),
        ("\\boxed{\\dfrac{2}{4}}", "1/2", 1.0),
        ("\\boxed{\\frac{1}{2}}", "\\boxed{0.5}", 1.0),
        ("\\boxed{ x^{2} + 1 }", "$x^2+1$", 1.0),
        ("\\boxed{41}", "42", 0.0),
        ("\\boxed{1/0}", "1/0", 1.0),
        ("\\boxed{1/0}", "0", 0.0),
        ("42", "42", -1.0),
        ("\\boxed{42", "42", -1.0),
        ("\\boxed{}", "42", -1.0),
    ],
)
def test_rewards(response: str, answer: str, reward: float) -> None:
    assert example.reward_fn(response, answer) == reward


def test_messages_and_defaults() -> None:
    task = example.MathTask("What is 1 + 1?", "2")
    plain = example.build_messages(task, fewshot=False)
    assert plain == [{"role": "user", "content": "What is 1 + 1?" + example.QUESTION_SUFFIX}]
    prefix = example.standard_fewshot_prefix()
    assert example.build_messages(task) == prefix + plain
    assert all(example.check_format(m["content"]) for m in prefix if m["role"] == "assistant")
    defaults = example.MathExampleConfig()
    assert (defaults.fewshot, defaults.temperature, defaults.top_p, defaults.max_tokens) == (True, 1.0, 1.0, 2048)
    assert defaults.reject_equal_rewards
    assert (example.DEFAULT_DATASET_PATH, example.DEFAULT_DATASET_SPLIT) == ("antonpl/math-dapo-25k", "train")


def test_with_replacement_gives_more_than_there_are_rows_and_the_seed_fixes_them() -> None:
    drawn = example.MathDAPODataset(rows=ROWS).sample(40)
    assert len(drawn) == 40
    assert drawn == example.MathDAPODataset(rows=ROWS, seed=0).sample(40)
    assert drawn != example.MathDAPODataset(rows=ROWS, seed=1).sample(40)
    once = example.MathDAPODataset(rows=ROWS, with_replacement=False)
    assert sorted(t.answer for t in once.sample(3) + once.sample(9)) == sorted(row["answer"] for row in ROWS)
    assert once.sample(1) == []  # the data has ended


def test_a_row_of_another_form_is_named() -> None:
    with pytest.raises(ValueError, match="columns text; one of question, problem, prompt is needed"):
        example.MathDAPODataset(rows=[{"text": "x"}]).sample(1)


def test_a_run_with_equal_rewards_rejected() -> None:
    texts = iter(range(10**6))
    with (
        FakeJobServer(completion=lambda body: "\\boxed{4}" if next(texts) % 3 else "4") as server,
        TokenFactory(server.url, "k") as client,
    ):
        summary = RolloutRunner(
            api_client=client,
            config=RolloutConfig(
                job_id=JOB,
                model_name="m",
                batch_size=4,
                num_samples_per_task=2,
                num_batches=1,
                status_polling_interval=0.01,
            ),
            rollout_fn=partial(example.roll_out_task, example_config=example.MathExampleConfig()),
            dataset=example.MathDAPODataset(rows=ROWS),
        ).run()
    assert summary.batches_filled == 1


def test_the_command_explains_itself_and_shadows_nothing() -> None:
    shown = CliRunner().invoke(example.main, ["--help"])
    assert shown.exit_code == 0
    assert "--no-fewshot" in shown.output
    code = (
        "import upweight.examples.math, math, sys; math.sqrt(4); print('openai' in sys.modules or 'jax' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
