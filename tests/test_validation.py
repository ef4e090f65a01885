"""Errors of pydantic in words."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, ValidationError, field_validator

from relay.settings import first_error_path_and_message


class Child(BaseModel):
    count: int

    @field_validator("count")
    @classmethod
    def _check_positive(cls, count: int) -> int:
        if count < 0:
            raise ValueError("expected a number from 0 on")
        return count


class Parent(BaseModel):
    children: list[Child]
    labels: dict[str, str] = {}


IS_NO_INTEGER = "Input should be a valid integer, unable to parse string as an integer"


@pytest.mark.parametrize(
    ("document", "path", "message"),
    [
        ("secret", "", "expected a JSON object"),
        ({}, "children", "Field required"),
        ({"children": ["secret"]}, "children.0", "expected a JSON object"),
        ({"children": [], "labels": []}, "labels", "expected a JSON object"),
        ({"children": [{"count": "secret"}, {}]}, "children.0.count", IS_NO_INTEGER),
        ({"children": [{"count": -1}]}, "children.0.count", "expected a number from 0 on"),
    ],
    ids=["no object", "missing field", "nested model", "mapping", "first of two", "validator"],
)
def test_the_first_error_has_a_path_and_no_input(document: Any, path: str, message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Parent.model_validate(document)
    assert first_error_path_and_message(caught.value) == (path, message)
