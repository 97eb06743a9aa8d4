"""Requests made up from our own OpenAPI document: whatever it allows is answered, and nothing breaks the server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from server_harness import KEY, Running

from upweight.server import Settings, create_app

pytestmark = pytest.mark.ci
BROKEN = {500, 501, 502, 504}


def operations() -> dict[str, Any]:
    """Of the document as the application makes it, by method and path."""
    document = schemathesis.openapi.from_dict(create_app(Settings(home=Path("unused"))).openapi())
    found = (result.ok() for result in document.get_all_operations())
    return {operation.label: operation for operation in found}


OPERATIONS = operations()


def test_the_document_is_served_and_names_the_contract(shared: Running) -> None:
    served = shared.http.get("/openapi.json").json()
    assert {f"{method.upper()} {path}" for path, methods in served["paths"].items() for method in methods} == set(
        OPERATIONS
    )
    assert "POST /v1alpha1/fine_tuning/jobs/{job_id}/batches/{batch_index}/samples" in OPERATIONS


@pytest.mark.parametrize("label", sorted(OPERATIONS))
def test_no_request_breaks_the_server(shared: Running, label: str) -> None:
    base = str(shared.http.base_url).rstrip("/")
    # The job that runs answers at once; those that would end it get one that waits.
    running = shared.http.get("/v1/fine_tuning/jobs", params={"limit": 100}).json()["data"][-1]["id"]
    job = shared.create_job() if label.rpartition("/")[2] in ("cancel", "pause", "resume") else running

    @settings(max_examples=12, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(case=OPERATIONS[label].as_strategy(), there=st.booleans())
    def ask(case: Any, there: bool) -> None:
        if there and "job_id" in (case.path_parameters or {}):
            case.path_parameters["job_id"] = job
        answer = case.call(base_url=base, headers={"Authorization": f"Bearer {KEY}"}, timeout=60)
        assert answer.status_code not in BROKEN, answer.text
        assert "Traceback" not in answer.text

    ask()
