"""Describes the errors of a configuration: one line for each, with its place and without secrets.

It translates the errors of pydantic into words for people who write YAML.
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, SecretStr, ValidationError
from pydantic_core import ErrorDetails

from relay.config.document import describe_type, line_of, location_prefix, path_of_variable
from relay.config.kinds import load_kinds
from relay.config.model import Config
from relay.settings import KeyPath, WrongValue, closest, format_path

_SECRET = re.compile(r"(whsec_|imdsr_)[^\s'\"]+|(:/+)[^\s/'\"]*@")
"""A secret that can be recognized wherever it was put by mistake."""
_EXPECTED = {
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "dict_type": "a mapping",
    "float_parsing": "a number",
    "float_type": "a number",
    "greater_than": "more than {gt:g}",
    "greater_than_equal": "{ge:g} or more",
    "int_parsing": "a whole number",
    "int_type": "a whole number",
    "invalid_key": "keys that are text",
    "literal_error": "{expected}",
    "mapping_type": "a mapping",
    "model_attributes_type": "a mapping",
    "model_type": "a mapping",
    "path_type": "a path",
    "string_pattern_mismatch": "text that matches {pattern}",
    "string_too_short": "at least {min_length} character",
    "string_type": "text",
    "too_long": "at most {max_length} entries",
    "too_short": "at least {min_length} entry",
    "tuple_type": "a list",
    "union_tag_invalid": "one of {expected_tags}",
}
"""What was expected, by the type of pydantic's error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigInputs:
    file: Path | None
    document: Any
    values: Any
    variables: Mapping[str, str]


def describe_errors(error: ValidationError, inputs: ConfigInputs) -> Iterator[str]:
    errors_by_path: dict[KeyPath, list[ErrorDetails]] = {}
    for details in error.errors(include_url=False):
        errors_by_path.setdefault(_key_path_of_error(details, inputs.values), []).append(details)
    for path, errors in errors_by_path.items():
        if not _follows_from_another_error(path, errors, errors_by_path):
            problem = _describe_problem(errors, path, inputs)
            place = location_prefix(inputs.file, inputs.document, path)
            variable = _environment_variable_of(path, inputs)
            if variable is not None:
                place = f"environment variable {variable}: {format_path(path)}: "
            yield _SECRET.sub(r"\1\2…", f"{place}{problem}")


def _follows_from_another_error(
    path: KeyPath, errors: Sequence[ErrorDetails], all_paths: Collection[KeyPath]
) -> bool:
    """Whether the only error here is of an alternative that was not meant, or of a bad entry.

    pydantic reports an error for each alternative of a value: of ``approve: {votes: 0}`` both
    ``approve: expected 'automatic'`` and ``approve.votes: expected 1 or more``. If one lies inside
    the value, that alternative was meant. Of a list, pydantic counts the valid entries only.
    """
    if len(errors) != 1 or errors[0]["type"] in ("missing", "value_error"):
        return False
    may_follow = errors[0]["type"] == "too_short" or len(errors[0]["loc"]) > len(path)
    return may_follow and any(other[: len(path)] == path != other for other in all_paths)


def _key_path_of_error(error: ErrorDetails, values: Any) -> KeyPath:
    """Return the key path of an error, without the parts that pydantic adds.

    pydantic adds the kind of a sink and the alternative of a union. These are not in the values,
    where only the last part may be missing. A section's own error may name one of its keys:
    ``listen: expected …``.

    Example: ``("sinks", 0, "webhook", "timeout")`` becomes ``("sinks", 0, "timeout")``.
    """
    path: list[str | int] = []
    node = values
    for index, part in enumerate(error["loc"]):
        is_sink_kind = index == 2 and error["loc"][0] == "sinks"
        if part in _child_keys_or_indexes(node) and not is_sink_kind:
            path.append(part)
            node = node[part]
    if error["type"] == "missing":
        path.append(error["loc"][-1])
    elif error["type"] in ("union_tag_invalid", "union_tag_not_found"):
        path.append(error["ctx"]["discriminator"].strip("'"))
    elif isinstance(wrong_value := error.get("ctx", {}).get("error"), WrongValue):
        path.extend(wrong_value.path)
    elif error["type"] == "value_error":
        key = error["msg"].removeprefix("Value error, ").partition(": ")[0]
        if key in _child_keys_or_indexes(node):
            path.append(key)
    return tuple(path)


def _child_keys_or_indexes(node: Any) -> Collection[str | int]:
    if isinstance(node, dict):
        return node
    return range(len(node)) if isinstance(node, list) else ()


def _environment_variable_of(path: KeyPath, inputs: ConfigInputs) -> str | None:
    for name in inputs.variables:
        pairs = zip(path, path_of_variable(name), strict=False)
        if path and all(str(part).lower() == variable_part for part, variable_part in pairs):
            return name
    return None


def _describe_problem(errors: Sequence[ErrorDetails], path: KeyPath, inputs: ConfigInputs) -> str:
    first = errors[0]
    if first["type"] == "extra_forbidden":
        return _describe_unknown_key(first["loc"])
    if first["type"] == "missing":
        return "expected this key, but it is missing"
    expectations = dict.fromkeys(_describe_expectation(error, path, inputs) for error in errors)
    sentence = " or ".join(expectations).replace(" or expected ", " or ")
    # A check of a whole section says what is wrong with the values of its keys. A check of a value
    # that must not be shown ends with its own ", got …", such as ", got that of an empty text".
    is_about_section = isinstance(first["input"], dict)
    already_says_what_it_got = ", got " in sentence
    if first["type"] == "value_error" and (is_about_section or already_says_what_it_got):
        return sentence
    text = f"{sentence}; got {_shown_value(first, path, inputs)}"
    if first["type"] == "union_tag_invalid":
        kind = str(first["ctx"]["tag"])
        if problem := dict(load_kinds().broken).get(kind):
            return f"{text}: {problem}"
        if close := closest(kind, load_kinds().modules):
            return f"{text}; did you mean {close}?"
    return text


def _describe_expectation(error: ErrorDetails, path: KeyPath, inputs: ConfigInputs) -> str:
    if isinstance(wrong_value := error.get("ctx", {}).get("error"), WrongValue):
        if wrong_value.other is None:
            return wrong_value.problem
        other = (*path[: len(path) - len(wrong_value.path)], *wrong_value.other)
        line = None if _environment_variable_of(other, inputs) else line_of(inputs.document, other)
        place = format_path(other) if line is None else f"in line {line}"
        return f"{wrong_value.problem}; the first is {place}"
    if error["type"] == "union_tag_not_found":
        if path[-1] == "role":
            return "expected one of agent, hub"
        return f"expected one of {', '.join(sorted(load_kinds().modules))}"
    if error["type"] in _EXPECTED:
        expected = _EXPECTED[error["type"]].format_map(error.get("ctx", {}))
        return f"expected {expected.replace('True', 'true').replace('False', 'false')}"
    message = error["msg"].removeprefix("Value error, ")
    return message.removeprefix(f"{path[-1]}: " if path else "")


def _shown_value(error: ErrorDetails, path: KeyPath, inputs: ConfigInputs) -> str:
    """Return a short value as it was written, and only the type of a long one. Hides secrets.

    Examples: ``timeout: 0s`` gives ``'0s'``, ``sinks: {}`` gives ``a mapping``.
    """
    if any(part in _secret_keys() for part in path):
        return "a value that is not shown, because it may be a secret"
    value = error["ctx"]["tag"] if error["type"] == "union_tag_invalid" else error["input"]
    if isinstance(value, float):
        value = functools.reduce(operator.getitem, path, inputs.values)  # as it was written
    if value is None or error["type"] == "union_tag_not_found":
        return "nothing"
    # Text in place of a whole section may hold a secret of that section.
    is_short = isinstance(value, str | int) and len(str(value)) <= 100
    is_container_expected = _EXPECTED.get(error["type"]) in ("a mapping", "a list")
    if is_short and not is_container_expected:
        return str(value).lower() if isinstance(value, bool) else repr(value)
    return describe_type(value)


@functools.cache
def _secret_keys() -> frozenset[str]:
    keys = {"key_sha256"}  # people put the key itself here by mistake
    sections: list[type[BaseModel]] = [Config]
    for section in sections:  # grows by the sections inside, which may contain themselves
        for key, parts in _keys_of(section).items():
            if SecretStr in parts:
                keys.add(key)
            sections += [each for each in _sections_among(parts) if each not in sections]
    return frozenset(keys)


def _describe_unknown_key(location: Sequence[str | int]) -> str:
    """Return what is wrong with a key and may be meant; ``location`` is that of pydantic."""
    key = str(location[-1])
    sections: list[type[BaseModel]] = [Config]
    for part in location[:-1]:
        types = [inner for section in sections for inner in _keys_of(section).get(str(part), ())]
        inner = _sections_among(types)
        # Else the part is an index, or names an alternative, such as the kind of a sink.
        sections = inner or [each for each in sections if _is_alternative(each, part)] or sections
    keys = list(dict.fromkeys(key for section in sections for key in _keys_of(section)))
    close = closest(key, keys)
    known = f"the keys here are {', '.join(keys)}"
    if close is not None:
        return f"unknown key; did you mean {close}? {known[0].upper()}{known[1:]}"
    elsewhere = [
        f"{name}.{key}"
        for name, parts in _keys_of(Config).items()
        for section in _sections_among(parts)
        if name != location[0] and key in _keys_of(section)
    ]
    if elsewhere:
        return f"unknown key; did you mean {' or '.join(dict.fromkeys(elsewhere))}?"
    return f"unknown key; {known}"


def _is_alternative(section: type[BaseModel], name: str | int) -> bool:
    tags = [section.model_fields[tag] for tag in ("kind", "role") if tag in section.model_fields]
    return section.__name__ == name or any(name in get_args(tag.annotation) for tag in tags)


def _keys_of(section: type[BaseModel]) -> dict[str, list[Any]]:
    """Return the keys of a section, each with its type and all types inside."""
    fields = section.model_fields.items()
    return {field.alias or name: _parts_of(field.annotation) for name, field in fields}


def _sections_among(types: list[Any]) -> list[type[BaseModel]]:
    return [each for each in types if isinstance(each, type) and issubclass(each, BaseModel)]


def _parts_of(annotation: Any) -> list[Any]:
    inner = (_parts_of(argument) for argument in get_args(annotation))
    return [annotation, *chain.from_iterable(inner)]
