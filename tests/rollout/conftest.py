import pytest
import tenacity

from tests.fakes import FakeJobServer
from upweight.api_client import TokenFactory
from upweight.rollout import RolloutRunner

from . import helpers


@pytest.fixture
def server():
    with FakeJobServer() as fake:
        yield fake


@pytest.fixture
def api(server):
    with TokenFactory(server.url, "key", tenacity_retry_wait=tenacity.wait_fixed(0.02)) as client:
        yield client


@pytest.fixture
def make_runner(api):
    def make(rollout_fn=helpers.rollout, dataset=None, **settings):
        return RolloutRunner(api, helpers.config(**settings), rollout_fn, dataset or helpers.Counting())

    return make
