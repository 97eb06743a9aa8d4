"""What all wire models share, and how they become request bodies."""

from __future__ import annotations

from enum import Enum
from typing import Any

from pydantic import BaseModel, ConfigDict, RootModel, SecretStr


class WireModel(BaseModel):
    """Fields that we do not know are kept: a newer server must not break this client."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())


class ValidationError(WireModel):
    """One problem of a refused request."""

    loc: list[str | int]
    msg: str
    type: str
    input: Any = None
    ctx: dict[str, Any] | None = None


class HTTPValidationError(WireModel):
    """Body of a 422."""

    detail: list[ValidationError] | None = None


def to_body(value: Any) -> Any:
    """A request model as plain JSON: optional fields that are None are left out, required ones are sent as null.

    Plain dictionaries inside are sent as they are; secrets are written out.
    """
    if isinstance(value, RootModel):
        return to_body(value.root)
    if isinstance(value, BaseModel):
        fields = type(value).model_fields
        items = {**{name: getattr(value, name) for name in fields}, **(value.model_extra or {})}
        return {
            name: to_body(item)
            for name, item in items.items()
            if item is not None or (name in fields and fields[name].is_required())
        }
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dict):
        return {key: to_body(item) for key, item in value.items()}
    return [to_body(item) for item in value] if isinstance(value, list | tuple) else value
