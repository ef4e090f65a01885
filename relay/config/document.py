"""Reads the YAML document and the environment variables into plain values.

It knows the syntax of both, and the line of each value. It does not know what the values mean.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from datetime import date, datetime
from importlib.resources.abc import Traversable
from typing import Any

import orjson
from ruamel.yaml import YAML
from ruamel.yaml.constructor import RoundTripConstructor
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from typing_extensions import override  # in typing from Python 3.12

from relay.errors import ConfigError
from relay.files import describe_os_error
from relay.settings import KeyPath, format_path

VARIABLE_PREFIX = "IMDS_RELAY_"

_REFERENCE = re.compile(r"\$(?:\$|\{([^}]*)\}|)")
"""``$$``, ``${NAME}``, or a dollar sign alone."""
_BAD_VALUES = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, AssertionError)
"""What ruamel raises for 2020-02-30, and for a value with the tag of another type."""
_KEYWORDS: Mapping[str, Any] = {"null": None, "true": True, "false": False}


class _Constructor(RoundTripConstructor):
    """Raises errors with the place of a value that cannot be read, and of both repeated keys."""

    @override
    def construct_object(self, node: Any, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except _BAD_VALUES:  # their text may quote a secret
            raise MarkedYAMLError(
                problem="found a date, number or word that does not exist; put text in quotes",
                problem_mark=node.start_mark,
            ) from None

    @override
    def check_mapping_key(
        self, node: Any, key_node: Any, mapping: Any, key: Any, value: Any
    ) -> bool:
        if key in mapping:
            first = mapping.lc.key(key)[0] + 1
            named = f' "{key}"' if isinstance(key, str) else ""
            raise MarkedYAMLError(
                problem=f"found duplicate key{named}; the first is in line {first}",
                problem_mark=key_node.start_mark,
            )
        return True


def read_document(file: Traversable) -> Any:
    """Return the document with the lines of its values. Raises ConfigError without values."""
    yaml = YAML(typ="rt", pure=True)  # YAML 1.2: "off" is text
    yaml.Constructor = _Constructor
    try:
        document = yaml.load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{file}: expected a file that can be read: {describe_os_error(error)}"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{file}: expected UTF-8 text: {error.reason} at byte {error.start}"
        ) from None
    except MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark is not None else ""
        problem = (error.problem or "it cannot be parsed").splitlines()[0]
        # Any value that it quotes may be a secret: a password may begin as an alias or tag does.
        problem = re.sub(r"'(?!<[a-z ]+>')[^']{2,}'", "'…'", problem)
        raise ConfigError(f"{file}{line}: expected YAML: {problem}") from None
    except RecursionError:
        raise ConfigError(f"{file}: expected YAML with less nesting") from None
    except (YAMLError, ValueError, OverflowError):  # of chr(), for "\U99999999"
        raise ConfigError(
            f"{file}: expected YAML, got a character that YAML does not allow"
        ) from None
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise ConfigError(
            f"{file}: expected a mapping of keys such as source: and sinks:, "
            f"got {describe_type(document)}"
        )
    return document


def expand_variables(
    file: Traversable | None, document: Any, environment: Mapping[str, str]
) -> Any:
    """Return a plain copy of the document with variables expanded. Raises ConfigError."""

    def expand(value: Any, path: KeyPath) -> Any:
        place = location_prefix(file, document, path)
        value = _read_scalar(value, place)
        if not isinstance(value, str):
            return value
        return _REFERENCE.sub(lambda match: _resolve_variable(match, place, environment), value)

    try:
        return _map_scalars(document, expand)
    except RecursionError:
        raise ConfigError(f"{file}: The YAML alias refers to its own parent.") from None


def _map_scalars(value: Any, change: Callable[[Any, KeyPath], Any], path: KeyPath = ()) -> Any:
    match value:
        case dict():
            return {key: _map_scalars(part, change, (*path, key)) for key, part in value.items()}
        case list():
            return [_map_scalars(part, change, (*path, at)) for at, part in enumerate(value)]
    return change(value, path)


def _resolve_variable(reference: re.Match[str], place: str, environment: Mapping[str, str]) -> str:
    if reference[0] == "$$":
        return "$"
    name = reference[1]
    if not name:
        raise ConfigError(f"{place}expected ${{NAME}} or $$, got a $ alone")
    if name not in environment:
        raise ConfigError(f"{place}expected the environment variable {name} to be set")
    return environment[name]


def _read_scalar(value: Any, place: str) -> Any:
    """Return a fraction or a date as text. Raises ConfigError for what no setting can be."""
    if isinstance(value, str) and "\0" in value:  # no path, header or argument can hold one
        raise ConfigError(f"{place}expected text without null characters")
    if isinstance(value, int) and abs(value) >= 2**63:
        raise ConfigError(f"{place}expected a smaller number")
    if isinstance(value, float):
        return str(value)  # no setting is a fraction; as text, 1.5 is refused as a duration
    if isinstance(value, date) and not isinstance(value, datetime):
        return value.isoformat()  # an api_version without quotes
    return value


def override_from_environment(values: dict[str, Any], variables: Mapping[str, str]) -> None:
    """Replace values of the document by those of environment variables. Raises ConfigError."""
    # Shorter names first, so that IMDS_RELAY_SOURCE__URL adds to IMDS_RELAY_SOURCE.
    for name in sorted(variables, key=len):
        *path, last = path_of_variable(name)
        section = values
        for key in path:
            if not isinstance(section.get(key), dict):
                section[key] = {}
            section = section[key]
        # A secret x of the environment also replaces x_file of the document, and vice versa.
        twin = last.removesuffix("_file") if last.endswith("_file") else f"{last}_file"
        if f"{VARIABLE_PREFIX}{'__'.join((*path, twin)).upper()}" not in variables:
            section.pop(twin, None)
        section[last] = _parse_variable_as_json_or_text(name, variables[name])


def path_of_variable(name: str) -> list[str]:
    return name.removeprefix(VARIABLE_PREFIX).lower().split("__")


def _parse_variable_as_json_or_text(name: str, text: str) -> Any:
    if text in _KEYWORDS:
        return _KEYWORDS[text]
    if not text.lstrip().startswith(("[", "{")):
        return text
    try:
        place = f"environment variable {name}: "
        return _map_scalars(orjson.loads(text), lambda value, _: _read_scalar(value, place))
    except orjson.JSONDecodeError as error:
        raise ConfigError(
            f"environment variable {name}: expected one JSON value: {error}"
        ) from None


def location_prefix(file: Traversable | None, document: Any, path: KeyPath) -> str:
    """Return a place as the start of a sentence: ``relay.yaml:3: source.interval: ``."""
    line = line_of(document, path)
    file_and_line = "" if file is None else f"{file}" if line is None else f"{file}:{line}"
    return "".join(f"{part}: " for part in (file_and_line, format_path(path)) if part)


def line_of(document: Any, path: KeyPath) -> int | None:
    line = None
    node = document
    for part in path:
        try:
            line = node.lc.data[part][0] + 1
            node = node[part]
        except (KeyError, IndexError, TypeError, AttributeError):  # a value has no lines inside
            break
    return line


def describe_type(value: Any) -> str:
    """Return the type of a value, for a sentence that must not show the value."""
    match value:
        case str():
            return "text"
        case bool():
            return "true or false"
        case int() | float():
            return "a number"
        case list() | tuple():
            return "a list" if value else "an empty list"
        case dict():
            return "a mapping"
    return "something else"
