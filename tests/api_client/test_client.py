import pickle
import re
import threading
import time
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import httpx
import pytest
import tenacity

import upweight.api_client as api
from tests.fakes import JOB, FakeJobServer, Reply
from upweight.api_client import _client, _retry
from upweight.api_client._retry import call_limits
from upweight.errors import TokenFactoryError, UpweightError


@pytest.fixture
def server():
    with FakeJobServer() as fake:
        yield fake


@pytest.fixture
def client(server):
    with api.TokenFactory(server.url, "secret-key", tenacity_retry_wait=tenacity.wait_none()) as made:
        yield made


def test_public_names():
    assert sorted(api.__all__) == [
        "APIError",
        "BadRequestError",
        "InformationalResponseError",
        "InternalServerError",
        "JsonParseError",
        "MissingAPIKeyError",
        "NotFoundError",
        "RedirectResponseError",
        "TokenFactory",
    ]
    assert (_client.ENV_PREFIX, _client.BASE_URL_ENV_VAR, _client.API_KEY_ENV_VAR, _client.DEFAULT_BASE_URL) == (
        "TOKENFACTORY_",
        "TOKENFACTORY_BASE_URL",
        "TOKENFACTORY_API_KEY",
        "https://api.tokenfactory.nebius.com",
    )
    assert issubclass(api.MissingAPIKeyError, TokenFactoryError)
    assert not issubclass(api.MissingAPIKeyError, api.APIError)
    assert not issubclass(api.NotFoundError, api.BadRequestError)
    assert issubclass(api.APIError, UpweightError)
    assert str(api.APIError(msg="why")) == "why"


def test_base_url_and_key_come_from_argument_environment_default(monkeypatch):
    monkeypatch.setenv("TOKENFACTORY_BASE_URL", "http://env.example/")
    monkeypatch.setenv("TOKENFACTORY_API_KEY", "from-env")
    with api.TokenFactory() as client:
        assert (client.base_url, client.api_key) == ("http://env.example", "from-env")
    with api.TokenFactory("http://arg.example///", "k") as client:
        assert (client.base_url, client.api_key) == ("http://arg.example", "k")
    monkeypatch.setenv("TOKENFACTORY_BASE_URL", "")
    with api.TokenFactory() as client:
        assert client.base_url == "https://api.tokenfactory.nebius.com"


@pytest.mark.parametrize("key", ["", "  ", None])
def test_blank_key_is_missing(key, monkeypatch):
    """Failure C7."""
    monkeypatch.setenv("TOKENFACTORY_API_KEY", " ")
    with pytest.raises(api.MissingAPIKeyError, match="TOKENFACTORY_API_KEY"):
        api.TokenFactory("http://x.example", key)


@pytest.mark.parametrize("key", ["secret\nkey", "secret\u2011key", "secret\x07key", "\ufeffsecret"])
def test_a_key_that_no_header_can_carry_is_told_at_once_and_not_shown(key, monkeypatch):
    """Failures C7, C8: such a key was sent four times, and the error showed it."""
    monkeypatch.setenv("TOKENFACTORY_API_KEY", key)
    for given, source in ((key, "api_key"), (None, "TOKENFACTORY_API_KEY")):
        with pytest.raises(ValueError, match=rf"^{source} cannot be sent: character \d+ of \d+ \(U\+") as caught:
            api.TokenFactory("http://x.example", given)
        assert "secret" not in str(caught.value)


@pytest.mark.parametrize("retries", [-1, None, "3", True, 1.5])
def test_a_number_of_retries_that_is_none_is_refused(retries):
    with pytest.raises(ValueError, match=r"max_retries is .* whole number from 0"):
        api.TokenFactory("http://x.example", "k", max_retries=retries)


@pytest.mark.parametrize("url", ["", "host.example", "ftp://host.example", "http://"])
def test_url_without_scheme_or_host(url):
    """Failure C7."""
    with pytest.raises(ValueError, match="base_url"):
        api.TokenFactory(url, "k")


def test_same_headers_on_each_attempt_and_one_key_per_post(server, client):
    """Failures C1, C2."""
    server.fail("/batches", 503, times=2)
    client.v1alpha1.fine_tuning.jobs.batches.create(job_id=JOB, index=0)
    client.v1alpha1.fine_tuning.jobs.batches.create(job_id=JOB, index=1)
    first, second, third, other = server.requests
    assert first.headers == second.headers == third.headers
    assert first.headers["Authorization"] == "Bearer secret-key"
    assert first.headers["Idempotency-Key"] != other.headers["Idempotency-Key"]
    assert first.raw == b'{"index":0}'


def test_headers_of_the_caller_win(server, client):
    client.get(f"{server.url}/v1alpha1/fine_tuning/jobs/{JOB}/status", headers={"authorization": "other", "X-A": "1"})
    assert server.requests[0].headers["authorization"] == "other"
    assert server.requests[0].headers["X-A"] == "1"


@pytest.mark.parametrize(
    ("status", "body", "error", "message", "calls"),
    [
        (301, None, api.RedirectResponseError, "Status code: 301", 1),
        (400, {"detail": "bad"}, api.BadRequestError, "bad", 1),
        (422, {"detail": [{"msg": "a"}, {"msg": "b"}]}, api.BadRequestError, "a; b", 1),
        (422, {"x": 1}, api.BadRequestError, "Message is not specified", 1),
        (401, {"error": {"message": "wrong key"}}, api.BadRequestError, "wrong key", 1),
        (403, b"<html>", api.BadRequestError, "Forbidden", 1),
        (409, {"detail": "full"}, api.BadRequestError, "full", 1),
        (404, {"detail": "no job"}, api.NotFoundError, "no job", 1),
        (404, b"<html>", api.NotFoundError, "Resource not found", 1),
        (429, {"detail": "slow down"}, api.BadRequestError, "slow down", 4),
        (413, {"detail": "too large"}, api.BadRequestError, "too large", 1),
        (425, {"detail": "too early"}, api.BadRequestError, "too early", 4),
        (408, {}, api.BadRequestError, "Request Timeout", 4),
        (500, {"detail": "x"}, api.InternalServerError, "Status code: 500", 4),
        (200, b"<html>", api.JsonParseError, "/status answered 200 with a body that is not JSON", 4),
    ],
)
def test_errors_and_attempts(server, client, status, body, error, message, calls):
    """Failures C4, C5."""
    server.fail("/status", status, body, times=100)
    with pytest.raises(api.APIError, match=re.escape(message)) as caught:
        client.v1alpha1.fine_tuning.jobs.get_runtime_status(job_id=JOB)
    assert type(caught.value) is error
    assert caught.value.response.status_code == status
    assert len(server.requests) == calls


def test_wrong_schema_names_the_fields_and_is_not_retried(server, client):
    """Failure C5."""
    server.fail("/status", 200, {"inference_version": "x", "total_batches": None})
    with pytest.raises(api.APIError, match=r"inference_version.*filled_batches") as caught:
        client.v1alpha1.fine_tuning.jobs.get_runtime_status(job_id=JOB)
    assert caught.value.response is not None
    assert len(server.requests) == 1


def test_retry_after_is_respected(server):
    """Failure C4."""
    server.fail("/status", 429, headers={"Retry-After": "0.3"})
    with api.TokenFactory(server.url, "k") as client:
        began = time.monotonic()
        client.v1alpha1.fine_tuning.jobs.get_runtime_status(job_id=JOB)
        assert 0.3 <= time.monotonic() - began < 0.8


def waited(headers, attempt=1):
    error = api.BadRequestError("slow down", httpx.Response(429, headers=headers))
    state = tenacity.RetryCallState(tenacity.Retrying(), None, (), {})
    state.attempt_number = attempt
    state.set_exception((type(error), error, None))
    return _retry._default_wait(state)


def test_waits_grow_with_jitter_and_follow_the_server_up_to_a_minute():
    """Failure C4: seconds or a date, 60 s at most, ±20 % on all default waits."""
    assert 60 <= waited({"Retry-After": "86400"}) <= 72
    later = format_datetime(datetime.now(UTC) + timedelta(seconds=30), usegmt=True)
    assert 28 <= waited({"Retry-After": later}) <= 37
    assert waited({"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"}) == 0
    assert 0.8 <= waited({"Retry-After": "soon"}) <= 1.2
    assert 0.8 <= waited({"Retry-After": "nan"}) <= 1.2
    for attempt, wait in enumerate([1, 2, 4, 8, 10, 10], 1):
        waits = [waited({}, attempt) for _ in range(200)]
        assert 0.8 * wait <= min(waits) < 0.9 * wait < 1.1 * wait < max(waits) <= 1.2 * wait


def test_numbers_that_json_has_not_are_sent_by_no_version_of_the_http_library(server, client):
    """Failure "not confirmed": literal NaN in a body."""
    with pytest.raises(ValueError, match="Out of range float"):
        client.post(f"{server.url}/x", json={"a": float("nan")})
    assert server.requests == []


def test_connection_errors_are_retried_and_the_last_one_is_raised():
    with api.TokenFactory("http://127.0.0.1:9", "k", tenacity_retry_wait=tenacity.wait_none()) as client:
        calls = []
        client.httpx_client.event_hooks["request"].append(calls.append)
        with pytest.raises(httpx.ConnectError):
            client.get("http://127.0.0.1:9/x")
        assert len(calls) == 4


def test_inference_is_not_repeated_after_a_read_timeout(server, client):
    server.fail("/chat/completions", delay=1.0, times=9)
    with pytest.raises(httpx.ReadTimeout):
        client.v1alpha1.fine_tuning.jobs.inference.openai.v1.chat.completions.create(
            job_id=JOB, model="m", messages=[], timeout=0.1
        )
    assert len(server.requests) == 1


def test_call_limits_cut_retries(server):
    server.fail("/status", 500, times=100)
    with api.TokenFactory(server.url, "k") as client:
        began = time.monotonic()
        with call_limits(deadline=began + 0.5), pytest.raises(api.InternalServerError):
            client.v1alpha1.fine_tuning.jobs.get_runtime_status(job_id=JOB)
        assert time.monotonic() - began < 1.0
        cancelled = threading.Event()
        threading.Timer(0.2, cancelled.set).start()
        with call_limits(cancelled=cancelled), pytest.raises(api.InternalServerError):
            client.v1alpha1.fine_tuning.jobs.get_runtime_status(job_id=JOB)
        assert time.monotonic() - began < 2.5


def test_life_cycle(server):
    """Failure C8."""
    made = []

    def factory():
        made.append(httpx.Client())
        return made[-1]

    client = api.TokenFactory(server.url, "secret-key", httpx_client_factory=factory)
    assert len(made) == 1
    assert client.httpx_client is made[0]
    assert "secret" not in repr(client)
    assert server.url in repr(client)
    client.close()
    client.close()
    with pytest.raises(RuntimeError, match="client is closed"):
        client.get(server.url)


def test_pickle(server):
    """Failures C8, W12."""
    with api.TokenFactory(server.url, "k", max_retries=7) as client:
        assert client.v1alpha1.fine_tuning.jobs is client.v1alpha1.fine_tuning.jobs
        restored = pickle.loads(pickle.dumps(client))
    assert restored._httpx_client is None
    pickle.loads(pickle.dumps(client)).close()
    with restored:
        assert restored.v1alpha1.fine_tuning.jobs.get_runtime_status(job_id=JOB).filled_batches == 0
        assert (restored.base_url, restored.api_key, restored._max_retries) == (server.url, "k", 7)


def test_scripted_answers_are_served(server, client):
    server.replies["GET", "/x"] = Reply(body={"a": 1})
    assert client.get(f"{server.url}/x").json() == {"a": 1}
