"""Says what is wrong with a configuration: a line each, with its place, what was expected and what came; never a secret."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from relay.config.document import KeyPath, at, dotted, kind, path_of

_SECRET = re.compile(r"(whsec_|imdsr_)[^\s'\"]+|(:/+)[^\s/'\"]*@")
_EXPECTED = {
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "dict_type": "a mapping",
    "greater_than": "more than {gt:g}",
    "greater_than_equal": "{ge:g} or more",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "int_type": "a whole number",
    "invalid_key": "keys that are text",
    "literal_error": "{expected}",
    "mapping_type": "a mapping",
    "model_attributes_type": "a mapping",
    "model_type": "a mapping",
    "path_type": "a path",
    "string_pattern_mismatch": "text that matches {pattern}",
    "string_type": "text",
    "too_long": "at most {max_length} entries",
    "too_short": "at least {min_length} entry",
    "tuple_type": "a list",
    "union_tag_invalid": "one of {expected_tags}",
}
"""What pydantic's errors mean to whoever writes YAML."""
_CONTAINERS = frozenset(
    {"dict_type", "mapping_type", "model_attributes_type", "model_type", "tuple_type"}
)
_KIND = frozenset({"union_tag_invalid", "union_tag_not_found"})


@dataclass(frozen=True, slots=True)
class ConfigInput:
    """What was read: the file, its document with the lines, the variables, and the values that all of it came to.

    ``secret`` are the names of keys whose values are never shown; ``kinds`` those that a sink can have.
    """

    file: Path | None
    document: Any
    values: Any
    variables: Mapping[str, str]
    secret: Collection[str]
    kinds: Collection[str]


def describe_errors(error: ValidationError, given: ConfigInput) -> Iterator[str]:
    """A line for each place where something is wrong."""
    wrong: dict[KeyPath, list[ErrorDetails]] = {}
    for one in error.errors(include_url=False):
        wrong.setdefault(_path(one, given.values), []).append(one)
    for path, errors in wrong.items():
        if (
            len(errors) == 1
            and _is_branch(errors[0], path)
            and any(other[: len(path)] == path != other for other in wrong)
        ):
            continue  # of the alternative, the other branch is the one that was meant
        # What has the look of a secret is not shown wherever it was put by mistake.
        yield _SECRET.sub(r"\1\2…", f"{_place(path, given)}{_problem(errors, path, given)}")


def _path(error: ErrorDetails, values: Any) -> KeyPath:
    """Where it is, without what pydantic puts between: the kind of a sink, the branch of an alternative.

    That is told by its not being in the document, where only the last part may be missing. And a section says by itself
    which of its keys it means: ``listen: expected …``.
    """
    path: list[str | int] = []
    place = values
    for index, part in enumerate(error["loc"]):
        kind_of_sink = index == 2 and error["loc"][0] == "sinks"
        if part in _keys(place) and not kind_of_sink:
            path.append(part)
            place = place[part]
    if error["type"] == "missing":
        path.append(error["loc"][-1])
    elif error["type"] in _KIND:
        path.append("kind")
    elif error["type"] == "value_error" and (head := _message(error).partition(": ")[0]) in _keys(
        place
    ):
        path.append(head)
    return tuple(path)


def _keys(place: Any) -> Collection[str | int]:
    return (
        place if isinstance(place, dict) else range(len(place)) if isinstance(place, list) else ()
    )


def _at(values: Any, path: KeyPath) -> Any:
    for part in path:
        values = values[part]
    return values


def _is_branch(error: ErrorDetails, path: KeyPath) -> bool:
    return error["type"] not in ("missing", "value_error") and len(error["loc"]) > len(path)


def _place(path: KeyPath, given: ConfigInput) -> str:
    for name in given.variables:
        if path and all(
            str(part).lower() == given_part
            for part, given_part in zip(path, path_of(name), strict=False)
        ):
            return f"environment variable {name}: {dotted(path)}: "
    return at(given.file, given.document, path)


def _problem(errors: Sequence[ErrorDetails], path: KeyPath, given: ConfigInput) -> str:
    first = errors[0]
    if first["type"] == "extra_forbidden":
        return "expected no such key; is it spelled right and in its place?"
    if first["type"] == "missing":
        return "expected this key, it is missing"
    sentence = " or ".join(
        dict.fromkeys(_expected(error, path, given) for error in errors)
    ).replace(" or expected ", " or ")
    if first["type"] == "value_error" and (
        isinstance(first["input"], dict) or ", got " in sentence
    ):
        return sentence  # of a whole section, or of a value that must not be shown: it says itself what came
    return f"{sentence}; got {_shown(first, path, given)}"


def _expected(error: ErrorDetails, path: KeyPath, given: ConfigInput) -> str:
    if error["type"] == "union_tag_not_found":
        return f"expected one of {', '.join(sorted(given.kinds))}"
    if error["type"] in _EXPECTED:
        expected = _EXPECTED[error["type"]].format_map(error.get("ctx", {}))
        return f"expected {expected.replace('True', 'true').replace('False', 'false')}"
    return _message(error).removeprefix(f"{path[-1]}: " if path else "")


def _message(error: ErrorDetails) -> str:
    return error["msg"].removeprefix("Value error, ")


def _shown(error: ErrorDetails, path: KeyPath, given: ConfigInput) -> str:
    value = error["ctx"]["tag"] if error["type"] == "union_tag_invalid" else error["input"]
    if any(part in given.secret for part in path):
        return "something else (not shown: it may be a secret)"
    if isinstance(value, float):  # seconds: as it was written
        value = _at(given.values, path)
    if value is None or error["type"] == "union_tag_not_found":
        return "nothing"
    # Text in place of a whole section may hold a secret of that section.
    if isinstance(value, str | int) and len(str(value)) <= 100 and error["type"] not in _CONTAINERS:
        return str(value).lower() if isinstance(value, bool) else repr(value)
    return kind(value)
