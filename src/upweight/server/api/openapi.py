"""What `/openapi.json` tells of request bodies: routes read them raw, to answer each fault in one line of their own."""

from __future__ import annotations

from typing import Any

from upweight.server.api.uploads import Upload
from upweight.server.file_methods import FILE_TYPES
from upweight.server.integrations import KINDS
from upweight.server.methods import Reinforcement

INDEX = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}


def described(schema: dict[str, Any]) -> dict[str, Any]:
    """`openapi_extra` of a route that takes a JSON body of this schema."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def an_object(required: tuple[str, ...], **properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "required": list(required), "properties": properties}


def inlined(schema: dict[str, Any]) -> dict[str, Any]:
    """A pydantic schema without references: it stands inside another document."""
    parts = schema.pop("$defs", {})

    def resolve(node: Any) -> Any:
        if isinstance(node, dict):
            if "$ref" in node:
                return resolve(parts[node["$ref"].rpartition("/")[2]])
            return {name: resolve(value) for name, value in node.items()}
        return [resolve(one) for one in node] if isinstance(node, list) else node

    resolved: dict[str, Any] = resolve(schema)
    return resolved


TEXT = {"type": "string"}
BATCH = described(an_object(("index",), index=INDEX))
SAMPLES = described(inlined(Upload.model_json_schema()))
METRICS = described(
    an_object(
        ("batch_index", "metrics"),
        batch_index=INDEX,
        metrics={"type": "object", "minProperties": 1, "additionalProperties": {"type": "number"}},
    )
)
PROMOTION = described(an_object((), name={**TEXT, "minLength": 1, "maxLength": 64}))
CHECKPOINT = an_object(
    ("type",), type={"const": "ft"}, checkpoint_id=TEXT, job_id=TEXT, step={"type": "integer", "minimum": 0}
)
INTEGRATIONS = [
    an_object(("type", name), **{"type": {"const": name}, name: inlined(kind.model_json_schema())})
    for name, kind in KINDS.items()
]
JOB = described(
    an_object(
        ("model", "method"),
        model=TEXT,
        training_file={"type": ["string", "null"]},
        suffix={"type": ["string", "null"], "maxLength": 64},
        seed={"type": ["integer", "null"], "minimum": 0},
        from_checkpoint={"anyOf": [CHECKPOINT, {"type": "null"}]},
        integrations={"type": ["array", "null"], "items": {"anyOf": INTEGRATIONS}},
        method={
            "anyOf": [
                an_object(
                    ("type", "reinforcement"),
                    type={"const": "reinforcement"},
                    reinforcement=inlined(Reinforcement.model_json_schema()),
                ),
                an_object(("type",), type={"enum": sorted(FILE_TYPES)}),
            ]
        },
    )
)
ASKED = described({"type": "object", "properties": {"model": TEXT, "messages": {"type": "array"}, "prompt": {}}})
