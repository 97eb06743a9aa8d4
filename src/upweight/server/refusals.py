"""A request that is answered with an error status. Store, supervisor and routes raise it; one handler writes the answer."""

from __future__ import annotations

from typing import Any

from upweight.errors import ServerError


class Refusal(ServerError):
    """`status` and `detail` (a text, or a list of {"loc", "msg", "type"}) of the answer, `extra` beside it."""

    def __init__(self, status: int, detail: str | list[dict[str, Any]], **extra: Any) -> None:
        self.status = status
        self.detail = detail
        self.extra = extra
        super().__init__(self.text)

    @property
    def text(self) -> str:
        if isinstance(self.detail, str):
            return self.detail
        return "; ".join(str(item["msg"]) for item in self.detail)


def not_found(what: str, name: object) -> Refusal:
    return Refusal(404, f"{what} {name} does not exist")


def invalid(loc: tuple[str | int, ...], message: str, kind: str = "value_error", **extra: Any) -> Refusal:
    return Refusal(422, [problem(loc, message, kind)], **extra)


def problem(loc: tuple[str | int, ...], message: str, kind: str = "value_error") -> dict[str, Any]:
    return {"loc": list(loc), "msg": message, "type": kind}
