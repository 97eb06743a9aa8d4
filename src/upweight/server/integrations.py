"""Which experiment trackers a job's metrics go to: the `integrations` of a request, checked, and their secrets kept apart.

Invariant: secrets stand in a file of the job's folder (mode 0600), which is removed once the job is over and all is sent. No table,
answer, event or log has them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, SecretStr, StringConstraints, ValidationError

from upweight.server.home import sync_folder, write_atomically
from upweight.server.refusals import invalid

FILE = "integrations.json"
CERTIFICATE = "mlflow-certificate.pem"  # beside it, as the file that MLflow wants
REMOTE = ("http", "https")
LOCAL = ("sqlite", "file")
PEM = "-----BEGIN CERTIFICATE-----"

Name = Annotated[str, StringConstraints(min_length=1, max_length=256)]
Tag = Annotated[str, StringConstraints(min_length=1, max_length=64)]


class _Settings(BaseModel):
    model_config = ConfigDict(extra="forbid", str_max_length=20_000, hide_input_in_errors=True)


class Wandb(_Settings):
    """Without `api_key` the server's own login is used."""

    project: Name
    name: Name | None = None
    entity: Name | None = None
    tags: list[Tag] | None = None
    api_key: SecretStr | None = None


class Mlflow(_Settings):
    tracking_uri: Name
    experiment_name: Name | None = None
    run_name: Name | None = None
    tags: dict[Tag, str] | None = None
    certificate_file: SecretStr | None = None
    certificate_file_id: None = None
    username: SecretStr | None = None
    password: SecretStr | None = None


KINDS: dict[str, type[_Settings]] = {"wandb": Wandb, "mlflow": Mlflow}


@dataclass(frozen=True, kw_only=True)
class Integration:
    kind: str  # wandb or mlflow
    shown: dict[str, Any]  # what answers tell
    secret: dict[str, str]

    @property
    def answer(self) -> dict[str, Any]:
        return {"type": self.kind, self.kind: self.shown}


def parse_integrations(given: object, *, local_tracking: bool) -> list[Integration]:
    """At most one of each kind. `local_tracking`: MLflow may write to this machine. Raises Refusal 422 without any secret."""
    if given is None:
        return []
    if not isinstance(given, list):
        raise invalid(("body", "integrations"), "integrations must be a list of objects")
    found = [_parse(one, index, local_tracking) for index, one in enumerate(given)]
    kinds = [one.kind for one in found]
    if twice := [kind for kind in KINDS if kinds.count(kind) > 1]:
        raise invalid(("body", "integrations"), f"integrations name {twice[0]} twice; a job has one of each kind")
    return found


def _parse(one: object, index: int, local_tracking: bool) -> Integration:
    loc = ("body", "integrations", index)
    kind = one.get("type") if isinstance(one, dict) else None
    if not isinstance(one, dict) or not isinstance(kind, str) or kind not in KINDS:
        what = f"type {kind[:40]!r}" if isinstance(kind, str) else "an integration without a type"
        raise invalid((*loc, "type"), f"integrations.{index}: {what} is not offered; offered: {', '.join(KINDS)}")
    try:
        settings = KINDS[kind].model_validate(one.get(kind) or {})
    except ValidationError as error:
        problem = error.errors(include_input=False, include_context=False, include_url=False)[0]
        where = (*loc, kind, *problem["loc"])
        path = ".".join(str(part) for part in where[1:])
        raise invalid(where, f"{path}: {problem['msg']}") from None  # its context may hold a secret
    if isinstance(settings, Mlflow):
        _check_mlflow(settings, (*loc, kind), local_tracking)
    values = {name: getattr(settings, name) for name in type(settings).model_fields}
    secret = {
        name: value.get_secret_value()
        for name, value in values.items()
        if isinstance(value, SecretStr) and value.get_secret_value()
    }
    shown = {name: value for name, value in values.items() if not _is_secret(settings, name)}
    return Integration(kind=kind, shown=shown, secret=secret)


def _is_secret(settings: _Settings, name: str) -> bool:
    return type(settings).model_fields[name].annotation == SecretStr | None


def _check_mlflow(settings: Mlflow, loc: tuple[str | int, ...], local_tracking: bool) -> None:
    where, uri = (*loc, "tracking_uri"), settings.tracking_uri
    try:
        parts = urlsplit(uri)
        host, login = parts.hostname, "@" in parts.netloc
    except ValueError as error:
        raise invalid(where, f"tracking_uri is not a URL: {error}") from None
    if login:
        raise invalid(where, "tracking_uri holds a login; send it as username and password")
    if parts.scheme in LOCAL and not local_tracking:
        text = f"tracking_uri = {uri!r} lies on the server's machine, where jobs may write with UPWEIGHT_LOCAL_TRACKING=1 only"
        raise invalid(where, text)
    if parts.scheme not in (*REMOTE, *LOCAL) or (parts.scheme in REMOTE and not host):
        raise invalid(where, f"tracking_uri = {uri!r}: the URL of an MLflow server, http:// or https://, is needed")
    pem = settings.certificate_file.get_secret_value() if settings.certificate_file else ""
    if pem and not pem.lstrip().startswith(PEM):
        raise invalid((*loc, "certificate_file"), f"certificate_file must be the text of a PEM file: {PEM}…")


def keep(integrations: list[Integration], folder: Path) -> None:
    """In the folder of their job, before the job exists."""
    folder.mkdir(parents=True, exist_ok=True)
    content = [{"kind": one.kind, "shown": one.shown, "secret": one.secret} for one in integrations]
    write_atomically(folder / FILE, json.dumps(content), mode=0o600)
    sync_folder(folder)


def kept(folder: Path) -> list[Integration]:
    """Those whose metrics are still to be sent."""
    try:
        return [Integration(**one) for one in json.loads((folder / FILE).read_text())]
    except FileNotFoundError:
        return []


def forget(folder: Path) -> None:
    for name in (FILE, CERTIFICATE):
        (folder / name).unlink(missing_ok=True)


def without_secrets(text: str, integration: Integration) -> str:
    for value in integration.secret.values():
        text = text.replace(value, "***")
    return text
