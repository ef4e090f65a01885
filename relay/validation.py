"""Validates what others send, and turns errors of pydantic into words for them."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, ValidationError


class RequestBody(BaseModel):
    """The base of the models of request bodies: unknown fields and other types are errors."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        hide_input_in_errors=True,
        use_attribute_docstrings=True,
    )


def first_error_path_and_message(error: ValidationError) -> tuple[str, str]:
    """Return the path of the first invalid value, with dots, and what is wrong with it.

    The path is empty if the whole document is wrong. Neither text repeats the input.
    """
    details = error.errors(include_url=False, include_input=False, include_context=False)[0]
    path = ".".join(str(part) for part in details["loc"])
    if details["type"] in ("model_type", "dict_type"):
        return path, "expected a JSON object"  # pydantic's text names a class
    return path, details["msg"].removeprefix("Value error, ")
