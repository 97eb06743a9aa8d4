"""What this server can do, for clients that look before they rely on something."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel

from upweight.server.api.context import ProjectOf
from upweight.server.api.openapi import inlined
from upweight.server.file_methods import Dpo, Supervised
from upweight.server.methods import Reinforcement

# What can be asked of every model served here.
INFERENCE = (
    "chat", "completions", "messages", "token_ids", "streaming", "tools", "json_object", "json_schema", "logprobs",
    "top_logprobs", "prompt_logprobs", "logit_bias", "penalties", "min_p", "seed", "stop", "stop_token_ids", "min_tokens",
)  # fmt: skip
METHODS: dict[str, type[BaseModel]] = {"reinforcement": Reinforcement, "supervised": Supervised, "dpo": Dpo}

router = APIRouter()


@router.get("/v1alpha1/capabilities")
async def capabilities(project: ProjectOf) -> dict[str, Any]:
    """Methods of jobs, each with its hyperparameters as a JSON schema (choices, defaults, ranges), and what inference offers."""
    methods = {name: inlined(model.model_json_schema()) for name, model in METHODS.items()}
    return {"object": "capabilities", "methods": methods, "inference": INFERENCE}
