"""The YAML document, composed of the sections that the rooms declare; the environment wins over it.

Nothing is started on a wrong one: every error names the file (and line) or the variable, the key path, what was expected
and what came, and never shows a secret.
"""

from __future__ import annotations

import functools
import operator
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import orjson
from pydantic import BaseModel, Field, SecretStr, ValidationError, model_validator
from pydantic_core import ErrorDetails
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedBase
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from relay import plugins, sinks
from relay.api import ApiSettings
from relay.approvals import ApprovalsSettings
from relay.errors import ConfigError
from relay.events.match import fits
from relay.imds import SourceSettings
from relay.outbox import StoreSettings
from relay.settings import Section
from relay.sinks import SinkSettings
from relay.telemetry import TelemetrySettings

PREFIX = "IMDS_RELAY_"
OWN = frozenset({"IMDS_RELAY_CONFIG", "IMDS_RELAY_URL", "IMDS_RELAY_KEY"})
"""Variables that the command line has for itself."""
PLACES = (Path("relay.yaml"), Path("/etc/imds-relay/relay.yaml"))
"""Where the document is looked for when none is named."""

_VARIABLE = re.compile(r"\$(?:\$|\{([^}]*)\}|)")


@functools.cache
def sink_members() -> dict[str, Any]:
    """The members of the family of sinks by kind."""
    return dict(plugins.members(sinks))


if TYPE_CHECKING:
    AnySink = SinkSettings
else:
    _settings = [member.Settings for member in sink_members().values()]
    AnySink = Annotated[functools.reduce(operator.or_, _settings), Field(discriminator="kind")] if len(_settings) > 1 else _settings[0]


class Config(Section):
    """The whole document."""

    scope: Literal["auto"] | Annotated[str, Field(pattern=r"^[a-z0-9-]{1,80}$")] = "auto"
    """The group of VMs that reads this document; auto asks the metadata service. Availability sets are named by hand."""
    relay: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,79}$")] = "auto"
    """This relay's own name; auto is the VM's name."""
    source: SourceSettings = SourceSettings()
    store: StoreSettings = StoreSettings()
    sinks: tuple[AnySink, ...] = ()
    """Any number, told apart by name."""
    approvals: ApprovalsSettings = ApprovalsSettings()
    api: ApiSettings = ApiSettings()
    telemetry: TelemetrySettings = TelemetrySettings()

    @model_validator(mode="after")
    def _fits_together(self) -> Config:
        names = [sink.name for sink in self.sinks]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise ValueError(f"sinks: expected every name once, {', '.join(repeated)} comes again")
        if self.approvals.amqp is not None and not any(_answers(sink) for sink in self.sinks):
            raise ValueError("approvals.amqp: expected a rabbitmq sink whose events include approval.*, through which the answers go")
        return self

    @property
    def user_events_wait(self) -> bool:
        """Whether no rule can match what users start: Azure then waits up to 15 minutes with each (FIELD 1.13)."""
        sources = (rule.match.event_source for rule in self.approvals.rules)
        return not any(source is None or "user" in {one.lower() for one in source} for source in sources)


USER_EVENTS_WAIT = (
    "no rule of approvals.rules can match event_source: [User]. Polling makes Azure wait up to 15 minutes for approval of each reboot that "
    "a user starts. Remedy: the rule that `imds-relay init` writes"
)


def _answers(sink: SinkSettings) -> bool:
    answers = ("approval.recorded", "approval.granted", "approval.refused", "approval.voided")
    return getattr(sink, "kind", None) == "rabbitmq" and all(fits(sink.events, name) for name in answers)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A configuration that holds, and the file it came from (None: defaults and environment alone)."""

    config: Config
    file: Path | None


def load(path: Path | None = None, environment: Mapping[str, str] = os.environ) -> Loaded:
    """Find, read and check the document. Raises ConfigError with everything that is wrong, a line each."""
    named = path or (Path(environment["IMDS_RELAY_CONFIG"]) if environment.get("IMDS_RELAY_CONFIG") else None)
    file = named or next((place for place in PLACES if place.is_file()), None)
    document = _read(file, environment) if file is not None else {}
    variables = {name: value for name, value in environment.items() if name.startswith(PREFIX) and name not in OWN}
    merged = _merge(_plain(document), variables)
    try:
        return Loaded(Config.model_validate(merged), file)
    except ValidationError as error:
        raise ConfigError("\n".join(_sentences(error, file, document, variables))) from None


# --- reading


def _read(file: Path, environment: Mapping[str, str]) -> Any:
    # YAML 1.2 with every key once, so that off is a word and a repeated key an error.
    try:
        document = YAML(typ="rt").load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file}: expected a file that can be read, got: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: expected UTF-8 text: {error.reason} at byte {error.start}") from error
    except MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark is not None else "?"
        problem = (error.problem or "not YAML").splitlines()[0]
        raise ConfigError(f"{file}:{line}: expected YAML, got: {_without_values(problem)}") from None
    except YAMLError as error:
        raise ConfigError(f"{file}: expected YAML, got: {type(error).__name__}") from None
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise ConfigError(f"{file}: expected a mapping of keys such as source: and sinks:, got {_kind(document)}")
    return _interpolated(document, file, (), environment)


def _without_values(problem: str) -> str:
    # "found duplicate key "url" with value "amqp://user:password@…" (original value: …)": the key is enough.
    return problem.split(" with value ", maxsplit=1)[0]


def _interpolated(value: Any, file: Path, path: tuple[str | int, ...], environment: Mapping[str, str]) -> Any:
    if isinstance(value, dict):
        for key in value:
            value[key] = _interpolated(value[key], file, (*path, key), environment)
    elif isinstance(value, list):
        for index, one in enumerate(value):
            value[index] = _interpolated(one, file, (*path, index), environment)
    elif isinstance(value, str):

        def fill(match: re.Match[str]) -> str:
            if match[0] == "$$":
                return "$"
            if match[1] is None:
                raise ConfigError(f"{file}: {_dotted(path)}: expected ${{NAME}} or $$ where a $ stands")
            if match[1] not in environment:
                raise ConfigError(f"{file}: {_dotted(path)}: expected the environment variable {match[1]}, it is not set")
            return environment[match[1]]

        return _VARIABLE.sub(fill, value)
    return value


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return value


def _merge(document: dict[str, Any], variables: Mapping[str, str]) -> dict[str, Any]:
    for name, text in variables.items():
        *path, last = _path_of(name)
        place = document
        for key in path:
            if not isinstance(place.get(key), dict):
                place[key] = {}
            place = place[key]
        place[last] = _value_of(name, text)
    return document


def _path_of(variable: str) -> list[str]:
    return variable.removeprefix(PREFIX).lower().split("__")


def _value_of(name: str, text: str) -> Any:
    if text == "null":
        return None
    if not text.lstrip().startswith(("[", "{")):
        return text
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"environment variable {name}: expected one JSON value: {error}") from None


# --- telling what is wrong


def _sentences(error: ValidationError, file: Path | None, document: Any, variables: Mapping[str, str]) -> Iterator[str]:
    for one in error.errors(include_url=False):
        path = _path(one)
        yield f"{_place(path, file, document, variables)}{_problem(one, path)}"


def _path(error: ErrorDetails) -> tuple[str | int, ...]:
    """The key path without what pydantic puts between: the kind of a sink, the branch of an alternative."""
    path: list[str | int] = []
    for index, part in enumerate(error["loc"]):
        after_sink = len(path) == 2 and path[0] == "sinks" and part in sink_members()  # sinks.<index>
        branch = isinstance(part, str) and (part == "Votes" or "[" in part)
        if not (after_sink or (branch and index)):
            path.append(part)
    return tuple(path)


def _place(path: tuple[str | int, ...], file: Path | None, document: Any, variables: Mapping[str, str]) -> str:
    for name in variables:
        given = tuple(_path_of(name))
        if tuple(str(part).lower() for part in path[: len(given)]) == given:
            return f"environment variable {name}: {_dotted(path)}: "
    if file is None:
        return f"{_dotted(path)}: " if path else ""
    line = _line(document, path)
    return f"{file}:{line}: {_dotted(path)}: " if line else f"{file}: {_dotted(path)}: " if path else f"{file}: "


def _line(document: Any, path: tuple[str | int, ...]) -> int | None:
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


def _dotted(path: tuple[str | int, ...]) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")


def _problem(error: ErrorDetails, path: tuple[str | int, ...]) -> str:
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "extra_forbidden":
        return "expected no such key; is it spelled right and in its place?"
    if error["type"] == "missing":
        return "expected this key, it is missing"
    if not path or (error["type"] == "value_error" and _kind(error["input"]) not in ("text", "number")):
        return message
    sentence = message if message.startswith("expected") else f"expected: {message[:1].lower()}{message[1:]}"
    return f"{sentence}; got {_shown(error['input'], path)}"


def _shown(value: Any, path: tuple[str | int, ...]) -> str:
    if any(part in _secret_names() for part in path):
        return "something else (not shown: it may be a secret)"
    if isinstance(value, str | int | float | bool) and len(str(value)) <= 100:  # a line
        return repr(value)
    return "nothing" if value is None else _kind(value)


def _kind(value: Any) -> str:
    match value:
        case str():
            return "text"
        case bool():
            return "true or false"
        case int() | float():
            return "number"
        case list() | tuple():
            return "a list"
        case dict():
            return "a mapping"
    return type(value).__name__


@functools.cache
def _secret_names() -> frozenset[str]:
    """The names of all fields that hold secrets, in every section."""
    found: set[str] = set()
    seen: set[type[BaseModel]] = set()

    def visit(model: type[BaseModel]) -> None:
        if model in seen:
            return
        seen.add(model)
        for name, field in model.model_fields.items():
            if SecretStr in _types_in(field.annotation):
                found.add(name)
            for inner in _types_in(field.annotation):
                if isinstance(inner, type) and issubclass(inner, BaseModel):
                    visit(inner)

    visit(Config)
    return frozenset(found)


def _types_in(annotation: Any) -> set[Any]:
    arguments = getattr(annotation, "__args__", ())
    return {annotation, *(inner for argument in arguments for inner in _types_in(argument))}
