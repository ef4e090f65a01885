"""/openapi.json as an oracle: no answer may be other than it says."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import orjson
from jsonschema import Draft202012Validator


@dataclass(frozen=True, slots=True)
class Description:
    document: dict[str, Any]

    def check(self, method: str, path: str, status: int, media: str, body: bytes) -> None:
        """Fail where the answer's status, content type or body is not described."""
        operation = self._operation(method, path)
        if operation is None:
            assert status == 404, f"{method} {path} is not described, and was answered {status}"
            return
        described = operation["responses"].get(str(status))
        assert described is not None, (
            f"{method} {path}: an answer {status} is not described: {body!r}"
        )
        described = self.document["components"]["responses"].get(
            described.get("$ref", "").rpartition("/")[2], described
        )
        kind = media.partition(";")[0]
        assert kind in described["content"], (
            f"{method} {path}: an answer {status} of {kind} is not described"
        )
        if "json" in kind and method != "HEAD":
            schema = described["content"][kind]["schema"]
            Draft202012Validator({**schema, "components": self.document["components"]}).validate(
                orjson.loads(body)
            )

    def _operation(self, method: str, path: str) -> dict[str, Any] | None:
        """Return the operation; of a path without this method one that describes its 405."""
        for template, item in self.document["paths"].items():
            if re.fullmatch(re.sub(r"{\w+}", "[^/]+", template), path):
                name = "get" if method == "HEAD" else method.lower()
                operation: dict[str, Any] = item.get(name) or {
                    "responses": {"405": next(iter(item.values()))["responses"]["405"]}
                }
                return operation
        return None
