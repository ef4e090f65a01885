"""Finds, reads and checks the configuration. Environment variables override the YAML document.

`load` finds the file, `document` reads it and the variables as plain values, `model` checks these,
and `problems` describes what is wrong. Each line of the ConfigError names the file with its line or
the variable, the key path, what was expected and what was there. It shows no secret.

`locate_relay` reads ``api.socket`` and ``store.path`` only, for the command line: no secret, and no
variable of another key. So it works for users who cannot read the secrets of the relay, and while
somebody edits the configuration.
"""

from __future__ import annotations

import importlib.resources
import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from relay.config.document import (
    VARIABLE_PREFIX,
    expand_variables,
    override_from_environment,
    read_document,
)
from relay.config.kinds import load_kinds
from relay.config.model import Config
from relay.config.problems import ConfigInputs, describe_errors
from relay.errors import ConfigError
from relay.files import is_planted, may_exist
from relay.telemetry import LogFormat

__all__ = [
    "AGENT_EXAMPLE",
    "DEFAULTS",
    "Config",
    "LoadedConfig",
    "find_log_format",
    "load",
    "load_kinds",
    "locate_relay",
]

DEFAULTS = importlib.resources.files("relay") / "default.yaml"
"""The annotated document with every default. Without a document the defaults apply."""
AGENT_EXAMPLE = importlib.resources.files("relay") / "agent.yaml"
"""An annotated document for an agent of a fleet."""
DEFAULT_PATHS = (Path("relay.yaml"), Path("/etc/imds-relay/relay.yaml"))
"""Where the document is if no option or variable names it: here, else that of the service."""
COMMAND_LINE_VARIABLES = frozenset({"IMDS_RELAY_CONFIG", "IMDS_RELAY_URL", "IMDS_RELAY_KEY"})
"""Variables with the prefix that are no settings: the command line reads them."""


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A valid configuration, and what a reload needs to know of its file."""

    config: Config
    file: Path | None
    """None if only defaults and variables apply."""
    document: Any = field(default=None, repr=False)  # it holds secrets
    """What is in the file, with the lines of its values."""

    @property
    def is_empty(self) -> bool:
        """Whether the file has no keys. A reload may refuse it: somebody may be writing it."""
        return self.file is not None and not self.document


def load(path: Path | None = None, environment: Mapping[str, str] = os.environ) -> LoadedConfig:
    """Find, read and check the document. Raises ConfigError with a line for each error."""
    file, document = _find_document(path, environment)
    values = expand_variables(file, document, environment)
    variables = {
        name: value
        for name, value in environment.items()
        if name.startswith(VARIABLE_PREFIX) and name not in COMMAND_LINE_VARIABLES
    }
    override_from_environment(values, variables)
    try:
        return LoadedConfig(Config.model_validate(values), file, document)
    except ValidationError as error:
        inputs = ConfigInputs(file=file, document=document, values=values, variables=variables)
        raise ConfigError("\n".join(describe_errors(error, inputs))) from None


def _find_document(path: Path | None, environment: Mapping[str, str]) -> tuple[Path | None, Any]:
    """Return the file that an option or a variable names, else the first that exists; read it.

    Raises ConfigError, also if a stranger put a file that nobody named there: the usual places
    include the current folder.
    """
    named = path or (Path(variable) if (variable := environment.get("IMDS_RELAY_CONFIG")) else None)
    if named is not None:
        return named, read_document(named)
    file = next((place for place in DEFAULT_PATHS if may_exist(place, stat.S_ISREG)), None)
    if file is None:
        return None, {}
    with suppress(OSError):  # whoever reads the file gets the reason
        if is_planted(file):
            raise ConfigError(
                f"{file} is of another user, in a folder that others can write, so it is not "
                f"used; to use it all the same: --config {file}"
            )
    return file, read_document(file)


def find_log_format(path: Path | None) -> LogFormat:
    """Return ``telemetry.log``, or text if that cannot be read. Raises no ConfigError.

    ``imds-relay run`` calls it before `load`, so that errors in the configuration are logged in the
    form that the operator asked for.
    """
    form = os.environ.get("IMDS_RELAY_TELEMETRY__LOG")
    if form is None:
        with suppress(ConfigError):
            telemetry = _find_document(path, os.environ)[1].get("telemetry")
            form = telemetry.get("log") if isinstance(telemetry, dict) else None
    return "json" if form == "json" else "text"


@dataclass(frozen=True, slots=True)
class RelayLocation:
    file: Path | None
    socket: str | None
    """``api.socket``: a path, or ``auto``. None: the relay has no local socket."""
    store_path: Path

    def state_file(self) -> Path:
        """Return the state file.

        A relative ``store.path`` begins at the folder in which the relay runs: this one, or that of
        the configuration. Raises ConfigError if both have the file. Whoever guesses then would
        verify the journal of another relay, or ask it.
        """
        folders = (Path(), self.file.parent if self.file is not None else Path())
        there = {os.path.realpath(folder / self.store_path): folder for folder in folders}
        found = [path for path in there if may_exist(Path(path))]
        if len(found) > 1:
            raise ConfigError(
                f"{self.file}: store.path begins at the folder in which the relay runs, and there "
                f"are {' and '.join(found)}: make it an absolute path"
            )
        return (there[found[0]] if found else folders[0]) / self.store_path


def locate_relay(
    path: Path | None = None, environment: Mapping[str, str] = os.environ
) -> RelayLocation:
    """Return where it is. Raises ConfigError for an unusable file, or one that was planted."""
    file, document = _find_document(path, environment)

    def value(section: str, key: str, default: str) -> str | None:
        """Return a text or null of the configuration. What `check` would refuse is the default."""
        values: dict[str, Any] = {}
        found = document.get(section)
        if isinstance(found, dict) and key in found:
            values = expand_variables(file, {section: {key: found[key]}}, environment)
        names = [f"{VARIABLE_PREFIX}{name}".upper() for name in (section, f"{section}__{key}")]
        given = {name: environment[name] for name in names if name in environment}
        override_from_environment(values, given)
        found = values.get(section)
        text = found.get(key, default) if isinstance(found, dict) else default
        return text if text is None or (isinstance(text, str) and text) else default

    socket, store = value("api", "socket", "auto"), value("store", "path", "relay.db")
    return RelayLocation(file, socket, Path(store or "relay.db"))
