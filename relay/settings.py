"""Strict models of what others write: the YAML document with secrets in files, and JSON bodies."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    PrivateAttr,
    SecretStr,
    ValidationError,
    model_validator,
)
from typing_extensions import override  # in typing from Python 3.12

from relay.files import FileBackedValue, describe_os_error, require_small_regular_file

_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def parse_duration(value: object) -> float:
    """Return the seconds of ``500ms``, ``1s``, ``5m``, ``2h`` or ``7d``. Raises ValueError."""
    match = _DURATION.fullmatch(value) if isinstance(value, str) else None
    seconds = float(match[1]) * _UNITS[match[2]] if match is not None else math.inf
    if not math.isfinite(seconds * 1000):  # no match, or more milliseconds than a float can hold
        raise ValueError("expected a duration such as 500ms, 1s, 5m, 2h or 7d")
    return seconds


def _duration(value: object) -> float:
    # Defaults in the code are floats. YAML numbers without a unit are not accepted.
    return value if isinstance(value, float) else parse_duration(value)


Duration = Annotated[float, BeforeValidator(_duration)]
"""A duration: text with a unit in the YAML document, seconds as a float in the code."""


def text_pattern_validator(pattern: str, form: str) -> AfterValidator:
    """Accept text that a regular expression matches as a whole.

    ``form`` describes it for people, with an example: ``a minute such as 08:00``.
    """
    compiled = re.compile(pattern)

    def check(text: str) -> str:
        if compiled.fullmatch(text) is None:
            raise ValueError(f"expected {form}")
        return text

    return AfterValidator(check)


Name = Annotated[
    str,
    text_pattern_validator(
        r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}",
        'a name such as "db-drain": letters, digits, ., _ and -, at most 64 characters',
    ),
]
"""The name of a sink, client, rule or limit."""

KeyPath = tuple[str | int, ...]


def format_path(path: KeyPath) -> str:
    """Return a key path as text: ``sinks[0].url``."""
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return "".join(parts).removeprefix(".")


class WrongValue(ValueError):
    """A value that is wrong because of another one, and where it is.

    ``path`` begins at the section that raises the error. ``other`` is the path of the other value,
    if the text should say where that is: of two equal names, the first.
    """

    def __init__(self, path: KeyPath, problem: str, other: KeyPath | None = None) -> None:
        super().__init__(f"{format_path(path)}: {problem}")
        self.path = path
        self.problem = problem
        self.other = other


class Section(BaseModel):
    """A part of the YAML document. Unknown keys are errors, and it does not change after loading.

    A field ``x`` of type ``SecretStr``, or a tuple of them, may have a second field ``x_file``.
    `reveal` and `reveal_list` return the current secret from whichever of the two is set. A file is
    read again when it changes.
    """

    # The whole configuration is read by one model, so the validators of its parts are not built.
    model_config = ConfigDict(
        extra="forbid", frozen=True, hide_input_in_errors=True, defer_build=True
    )

    _files: dict[str, FileBackedValue[str]] = PrivateAttr(default_factory=dict)

    @override
    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.__dict__ == other.__dict__

    __hash__ = None  # type: ignore[assignment]  # a section can hold mappings

    @model_validator(mode="after")
    def _register_secret_file_readers(self) -> Section:
        for field in type(self).model_fields:
            file_field = f"{field}_file"
            path = getattr(self, file_field, None)
            if path is None:
                continue
            if getattr(self, field):
                raise ValueError(f"expected one of {field} and {file_field}, got both")
            try:
                secret_file = FileBackedValue((path,), partial(_read_secret_file, path))
            except ValueError as error:
                raise ValueError(f"{file_field}: {error}") from error
            if not secret_file.get():
                raise ValueError(f"{file_field}: expected a secret in the file, it is empty")
            self._files[field] = secret_file
        return self

    @property
    def has_secret_files(self) -> bool:
        """Whether a secret of this section is in a file, and so can change."""
        return bool(self._files)

    def run_field_checks(self, checks: Mapping[str, Callable[[], object]]) -> None:
        """Call the check of the secret in each field: sections call it in a validator.

        A ValueError of a check is raised with the configured key before its text: the field's name,
        or that of the field for its file.
        """
        for field, check in checks.items():
            try:
                check()
            except ValueError as error:
                key = f"{field}_file" if field in self._files else field
                raise ValueError(f"{key}: {error}") from None

    def reveal(self, field: str) -> str | None:
        """Return the current secret of a field; None if it has none."""
        if field in self._files:
            return self._files[field].get()
        value: SecretStr | None = getattr(self, field)
        return value.get_secret_value() if value is not None else None

    def reveal_list(self, field: str) -> tuple[str, ...]:
        """Return all current secrets of a field that holds several. A file has one per line."""
        if field in self._files:
            return self.reveal_file_lines(field)
        values: tuple[SecretStr, ...] = getattr(self, field)
        return tuple(value.get_secret_value() for value in values)

    def iter_current_secret_texts(self) -> Iterator[str]:
        """Yield every current secret of this section and of the sections inside it."""
        for _, value in values_in(self):
            if isinstance(value, SecretStr):
                yield value.get_secret_value()
            elif isinstance(value, Section):
                for field in value._files:  # noqa: SLF001  # of a section inside this one
                    yield from value.reveal_file_lines(field)

    def reveal_file_lines(self, field: str) -> tuple[str, ...]:
        """Return the current lines of a field's file, without empty lines. It must have one."""
        lines = (line.strip() for line in self._files[field].get().splitlines())
        return tuple(line for line in lines if line)


def values_in(value: object, path: KeyPath = ()) -> Iterator[tuple[KeyPath, object]]:
    """Yield a section and everything in it: sections, lists, mappings and values, with the path."""
    yield path, value
    parts: Iterable[tuple[str | int, object]] = ()
    match value:
        case BaseModel():
            parts = value
        case Mapping():
            parts = value.items()
        case tuple():
            parts = enumerate(value)
    for name, part in parts:
        yield from values_in(part, (*path, name))


def _read_secret_file(path: Path) -> str:
    try:
        require_small_regular_file(path)
        return path.read_text(encoding="utf-8").strip()
    except OSError as error:
        problem = describe_os_error(error)
    except UnicodeDecodeError:
        problem = "it is not UTF-8 text"
    raise ValueError(f"expected a readable file, {path} could not be read: {problem}")


def check_unique(
    key: str, entries: Sequence[object], field: str = "name", *, with_case: bool = False
) -> None:
    """Raise WrongValue for two equal values of a field, also by case unless ``with_case``."""
    places = ((key, index, field) for index in range(len(entries)))
    values = (getattr(entry, field) for entry in entries)
    _check_differ(zip(places, values, strict=True), with_case=with_case)


def check_keys_differ_without_case(key: str, names: Iterable[str]) -> None:
    """Raise WrongValue if two keys of the mapping under a key differ by case only."""
    _check_differ((((key, name), name) for name in names), with_case=False)


def _check_differ(values: Iterable[tuple[KeyPath, str | None]], *, with_case: bool) -> None:
    seen: dict[str, tuple[KeyPath, str]] = {}
    for path, value in values:
        if value is None:
            continue
        first, other = seen.setdefault(value if with_case else value.lower(), (path, value))
        if first != path:
            problem = f"duplicate {path[-1]}: {value}"
            if other != value:
                problem = f"expected names that differ by more than case, got {other} and {value}"
            raise WrongValue(path, problem, first)


class RequestBody(BaseModel):
    """The base of the models of request bodies: unknown fields and other types are errors."""

    model_config = ConfigDict(
        defer_build=True,  # until somebody sends one
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
    if details["type"] in ("model_type", "dict_type", "dataclass_type"):
        return path, "expected a JSON object"  # pydantic's text names a class
    if details["type"] == "extra_forbidden":
        return path, "expected no field of this name: /openapi.json has those of this body"
    return path, details["msg"].removeprefix("Value error, ")


def closest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that is most like a name, without case; None if none is like it."""
    by_name = {other.lower(): other for other in known}
    matches = difflib.get_close_matches(name.lower(), by_name, n=1)
    return by_name[matches[0]] if matches else None


def describe_choices(name: str, known: Iterable[str], *, prefix: str = "") -> str:
    """Return what to write in place of an unknown name, as the end of a sentence.

    ``prefix`` precedes each name. Example: ``did you mean drain? There are bus, drain``.
    """
    names = list(dict.fromkeys(known))
    if not names:
        return "there are none"
    listed = f"{'there is' if len(names) == 1 else 'there are'} "
    listed += ", ".join(f"{prefix}{each}" for each in names)
    close = closest(name, names)
    if close is None:
        return listed
    return f"did you mean {prefix}{close}? {listed[0].upper()}{listed[1:]}"


MAX_NAMES = 10
"""Machines or people that a text names; the rest are counted."""


def join_names(names: Sequence[str], *, most: int = MAX_NAMES, separator: str = ", ") -> str:
    """Return names in one line: the first ``most``, and how many more there are."""
    shown = separator.join(names[:most])
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown
