from pathlib import Path

import pytest

from upweight.weights.source import resolve


@pytest.fixture(scope="session")
def smollm_path() -> Path:
    return Path(resolve("smollm2").path)
