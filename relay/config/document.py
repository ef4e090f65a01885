"""Reads the YAML document and the environment that wins over it, into plain values. What they mean is not known here."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import date, datetime
from importlib.resources.abc import Traversable
from typing import Any

import orjson
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedBase
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from relay.errors import ConfigError
from relay.files import reason

PREFIX = "IMDS_RELAY_"

KeyPath = tuple[str | int, ...]
_VARIABLE = re.compile(r"\$(?:\$|\{([^}]*)\}|)")
_WORDS: Mapping[str, Any] = {"null": None, "true": True, "false": False}


def read(file: Traversable) -> Any:
    """The document, each part with its line. Raises ConfigError, which never quotes a value."""
    # YAML 1.2 with every key once, so that off is a word and a repeated key an error.
    try:
        document = YAML(typ="rt", pure=True).load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file}: expected a file that can be read: {reason(error)}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{file}: expected UTF-8 text: {error.reason} at byte {error.start}"
        ) from None
    except MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark is not None else ""
        problem = (error.problem or "something else came").splitlines()[0]
        raise ConfigError(f"{file}{line}: expected YAML: {_without_values(problem)}") from None
    except RecursionError:
        raise ConfigError(f"{file}: expected YAML that is not nested hundreds of times") from None
    except YAMLError:
        raise ConfigError(
            f"{file}: expected YAML: it holds a character that YAML does not allow"
        ) from None
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise ConfigError(
            f"{file}: expected a mapping of keys such as source: and sinks:, got {kind(document)}"
        )
    return document


def _without_values(problem: str) -> str:
    # 'found duplicate key "url" with value "amqp://user:password@…"': the key is enough. And an alias that is not defined,
    # or a tag that is not known, may be a password that begins with * or !.
    return re.sub(r"'(?!<[a-z ]+>')[^']{2,}'", "'…'", problem.split(" with value ", maxsplit=1)[0])


def expand_variables(
    file: Traversable | None, document: Any, environment: Mapping[str, str]
) -> Any:
    """A plain copy of the document with its variables filled in. Raises ConfigError for one that is not set."""

    def copy(value: Any, path: KeyPath) -> Any:
        match value:
            case dict():
                return {key: copy(one, (*path, key)) for key, one in value.items()}
            case list():
                return [copy(one, (*path, index)) for index, one in enumerate(value)]
            case str():
                return _VARIABLE.sub(
                    lambda found: _value_for(found, at(file, document, path), environment), value
                )
        return _scalar(value)

    try:
        return copy(document, ())
    except RecursionError:
        raise ConfigError(f"{file}: expected a document, got one that holds itself") from None


def _value_for(found: re.Match[str], place: str, environment: Mapping[str, str]) -> str:
    if found[0] == "$$":
        return "$"
    if not found[1]:
        raise ConfigError(f"{place}expected ${{NAME}} or $$ where a $ stands")
    if found[1] not in environment:
        raise ConfigError(f"{place}expected the environment variable {found[1]}, it is not set")
    return environment[found[1]]


def _scalar(value: Any) -> Any:
    if isinstance(value, float):
        return str(
            value
        )  # no setting is a fraction: as text, 1.5 is refused for its lack of a unit
    if isinstance(value, date) and not isinstance(value, datetime):
        return value.isoformat()  # an api_version without quotes
    return value


def override(values: dict[str, Any], variables: Mapping[str, str]) -> None:
    """Put what the environment says in place of what the document says. Raises ConfigError."""
    # The shorter name first: IMDS_RELAY_SOURCE__URL adds to what IMDS_RELAY_SOURCE gives.
    for name in sorted(variables, key=len):
        *path, last = path_of(name)
        place = values
        for key in path:
            if not isinstance(place.get(key), dict):
                place[key] = {}
            place = place[key]
        twin = last.removesuffix("_file") if last.endswith("_file") else f"{last}_file"
        if f"{PREFIX}{'__'.join((*path, twin)).upper()}" not in variables:
            place.pop(
                twin, None
            )  # x of the document gives way to x_file of the environment, and the other way round
        place[last] = _value_of(name, variables[name])


def path_of(variable: str) -> list[str]:
    """The key path that a variable stands for, in lower case."""
    return variable.removeprefix(PREFIX).lower().split("__")


def _value_of(name: str, text: str) -> Any:
    if text in _WORDS:
        return _WORDS[text]
    if not text.lstrip().startswith(("[", "{")):
        return text
    try:
        return _json(orjson.loads(text))
    except orjson.JSONDecodeError as error:
        raise ConfigError(
            f"environment variable {name}: expected one JSON value: {error}"
        ) from None


def _json(value: Any) -> Any:
    match value:
        case dict():
            return {key: _json(one) for key, one in value.items()}
        case list():
            return [_json(one) for one in value]
    return _scalar(value)


def at(file: Traversable | None, document: Any, path: KeyPath) -> str:
    """Names a place, ready to put a sentence behind: ``relay.yaml:3: source.interval: ``."""
    line = _line(document, path)
    named = "" if file is None else f"{file}" if line is None else f"{file}:{line}"
    return "".join(f"{part}: " for part in (named, dotted(path)) if part)


def _line(document: Any, path: KeyPath) -> int | None:
    line = None
    place = document
    for part in path:
        if not isinstance(place, CommentedBase):
            break
        try:
            line = place.lc.data[part][0] + 1
            place = place[part]  # type: ignore[index]  # a mapping or a sequence
        except (KeyError, IndexError, TypeError, AttributeError):
            break
    return line


def dotted(path: KeyPath) -> str:
    """A key path as people write it: ``sinks[0].url``."""
    return "".join(
        f"[{part}]" if isinstance(part, int) else f".{part}" for part in path
    ).removeprefix(".")


def kind(value: Any) -> str:
    """What sort of thing a value is, for sentences that must not show the value itself."""
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
