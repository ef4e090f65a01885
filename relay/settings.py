"""What the sections of the YAML document are made of: strict models, durations, and secrets that may live in files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    PrivateAttr,
    SecretStr,
    WithJsonSchema,
    model_validator,
)

from relay.files import reason

_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def parse_duration(value: object) -> float:
    """Seconds from ``500ms``, ``1s``, ``5m``, ``2h`` or ``7d``. Raises ValueError for anything else."""
    match = _DURATION.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise ValueError("expected a duration such as 500ms, 1s, 5m, 2h or 7d")
    return float(match[1]) * _UNITS[match[2]]


def _duration(value: object) -> float:
    # Defaults in the code are floats already; YAML numbers without a unit are not accepted.
    return value if isinstance(value, float) else parse_duration(value)


Duration = Annotated[
    float,
    BeforeValidator(_duration),
    WithJsonSchema(
        {
            "type": "string",
            "pattern": rf"^{_DURATION.pattern}$",
            "examples": ["500ms", "1s", "5m", "2h", "7d"],
        }
    ),
]
"""A span of time: text with a unit in the YAML document, seconds as a float in the code."""


class SecretFile:
    """The text of a file that holds a secret, read again whenever the file changes.

    While the file cannot be read after it could be once (it is just being replaced), the last text holds.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp: tuple[int, int, int] | None = None
        self._text = ""

    def text(self) -> str:
        """The current text without the line end. Raises ValueError, naming the file, if it never could be read."""
        try:
            found = self._path.stat()
            stamp = (found.st_mtime_ns, found.st_size, found.st_ino)
            if stamp != self._stamp:
                self._text = self._path.read_text(encoding="utf-8").strip()
                self._stamp = stamp
        except (OSError, UnicodeDecodeError) as error:
            if self._stamp is None:
                problem = reason(error) if isinstance(error, OSError) else "it is not UTF-8 text"
                raise ValueError(
                    f"expected a readable file, {self._path} could not be read: {problem}"
                ) from error
        return self._text


class Section(BaseModel):
    """A part of the YAML document: unknown keys are errors, and nothing changes after it was read.

    A field ``x`` of type ``SecretStr`` (or a tuple of them) may have a neighbour ``x_file``; ``reveal`` and ``reveal_all``
    give the current secret wherever it lives.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, hide_input_in_errors=True, use_attribute_docstrings=True
    )

    _files: dict[str, SecretFile] = PrivateAttr(default_factory=dict)

    @model_validator(mode="after")
    def _secrets_are_given_once_and_readable(self) -> Section:
        for name in type(self).model_fields:
            plain = name.removesuffix("_file")
            if plain == name or plain not in type(self).model_fields or getattr(self, name) is None:
                continue
            if getattr(self, plain):
                raise ValueError(f"expected one of {plain} and {name}, got both")
            self._files[plain] = SecretFile(getattr(self, name))
            try:
                empty = not self._files[plain].text()
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
            if empty:
                raise ValueError(f"{name}: expected a secret in the file, it is empty")
        return self

    @property
    def has_secret_files(self) -> bool:
        """Whether a secret of this section lives in a file, and may be another one at the next look."""
        return bool(self._files)

    def reveal(self, name: str) -> str | None:
        """The secret ``name`` as it is now, from the document or its file; None where neither is given."""
        if name in self._files:
            return self._files[name].text()
        value: SecretStr | None = getattr(self, name)
        return value.get_secret_value() if value is not None else None

    def reveal_all(self, name: str) -> tuple[str, ...]:
        """Every secret of the list ``name`` as it is now; a file holds one a line."""
        if name in self._files:
            return self.reveal_lines(name)
        values: tuple[SecretStr, ...] = getattr(self, name)
        return tuple(value.get_secret_value() for value in values)

    def reveal_lines(self, name: str) -> tuple[str, ...]:
        """The lines of the file of ``name`` as they are now, without empty ones."""
        return tuple(line.strip() for line in self._files[name].text().splitlines() if line.strip())


def json_schema(model: type[BaseModel]) -> dict[str, Any]:
    """The JSON Schema of a section, for the configuration reference."""
    return model.model_json_schema(mode="validation")
