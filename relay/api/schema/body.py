"""Reads request bodies: the only way from the bytes of a body to its model."""

from __future__ import annotations

from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from relay.api.schema.problems import Problem
from relay.approvals.request import MalformedBody, read_json

Model = TypeVar("Model", bound=BaseModel)


class RequestBody(BaseModel):
    """The base of the models of request bodies: unknown fields and other types are errors."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        hide_input_in_errors=True,
        use_attribute_docstrings=True,
    )


def parse_json_body(model: type[Model], content: bytes) -> Model:
    """Return the model of a body.

    Raises Problem 400 for anything but a JSON object with unique keys, and Problem 422 for the
    first invalid field.
    """
    try:
        fields = read_json(content)
    except MalformedBody as error:
        raise Problem(400, str(error)) from None
    if not isinstance(fields, dict):
        raise Problem(400, "expected a JSON object")
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        is_own_error = first["type"] == "value_error"
        message = str(first["ctx"]["error"]) if is_own_error else first["msg"]
        raise Problem(422, f"{field}: {message}", field=field) from None
