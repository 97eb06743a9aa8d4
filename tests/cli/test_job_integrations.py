"""`--integration`: where a job's metrics go, and what of a login leaves this machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Command
from upweight.cli.job_integrations import integrations
from upweight.errors import ConfigError

LOGINS = ("WANDB_API_KEY", "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD")


@pytest.fixture(autouse=True)
def _no_logins(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LOGINS:
        monkeypatch.delenv(name, raising=False)


def test_the_short_form_names_the_place() -> None:
    assert integrations(["wandb:sums", "mlflow:https://mlflow.example:5000/"]) == [
        {"type": "wandb", "wandb": {"project": "sums"}},
        {"type": "mlflow", "mlflow": {"tracking_uri": "https://mlflow.example:5000/"}},
    ]
    assert integrations(["wandb:team/sums"]) == [{"type": "wandb", "wandb": {"project": "sums", "entity": "team"}}]


def test_a_login_goes_with_the_short_form_of_its_own_tracker_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LOGINS:
        monkeypatch.setenv(name, f"value of {name}")
    wandb, mlflow = integrations(["wandb:sums", "mlflow:https://m"])
    assert wandb["wandb"] == {"project": "sums", "api_key": "value of WANDB_API_KEY"}
    assert mlflow["mlflow"] == {
        "tracking_uri": "https://m",
        "username": "value of MLFLOW_TRACKING_USERNAME",
        "password": "value of MLFLOW_TRACKING_PASSWORD",
    }
    written = {"type": "wandb", "wandb": {"project": "sums"}}
    assert integrations([json.dumps(written)]) == [written]


def test_json_may_be_one_tracker_a_list_or_a_file(tmp_path: Path) -> None:
    one = {"type": "wandb", "wandb": {"project": "sums", "tags": ["a"]}}
    other = {"type": "mlflow", "mlflow": {"tracking_uri": "https://m"}}
    file = tmp_path / "trackers.json"
    file.write_text(json.dumps([one, other]))
    assert integrations([json.dumps(one), json.dumps(other)]) == [one, other]
    assert integrations([str(file)]) == [one, other]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("wandb:", "nothing stands behind the colon"),
        ("/nowhere.json", "No such file or directory"),
        ("tensorboard:x", "No such file or directory; give wandb:PROJECT"),
        ('{"type": "wandb", "api_key": "secret"', "text is not JSON"),
        ("[1]", "no object"),
    ],
)
def test_what_cannot_be_used_is_named_without_what_may_be_secret(given: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told) as refused:
        integrations([given])
    assert "secret" not in str(refused.value)


def test_the_server_gets_them_and_what_it_refuses_is_one_line(
    upweight: Command, in_server_home: Path, tiny_model_folder: Path
) -> None:
    create = ["jobs", "create", "--model", str(tiny_model_folder), "--batch-size", "1", "--integration"]
    for given, told in (
        (["mlflow:ftp://m"], "tracking_uri = 'ftp://m'"),
        (["wandb:a", "--integration", "wandb:b"], "integrations name wandb twice"),
        (['{"type": "wandb", "wandb": {"api_key": "secret"}}'], "integrations.0.wandb.project: Field required"),
    ):
        refused = upweight(*create, *given)
        assert (refused.code, refused.out, refused.err.count("\n")) == (1, "", 1)
        assert told in refused.err
        assert "secret" not in refused.err
