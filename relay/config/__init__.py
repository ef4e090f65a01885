"""Finds, reads and checks the configuration. Environment variables override the YAML document.

`load` goes through the modules of this package in this order: `location` finds the file,
`document` reads it and the variables as plain values, `model` checks these, and `problems`
describes what is wrong. Each line of the ConfigError names the file with its line or the variable,
the key path, what was expected and what was there. It shows no secret.
"""

from __future__ import annotations

import importlib.resources
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError

from relay.config.changes import RESTART_KEYS
from relay.config.document import (
    VARIABLE_PREFIX,
    expand_variables,
    line_of,
    override_from_environment,
    read_document,
)
from relay.config.kinds import sink_modules
from relay.config.location import DEFAULT_PATHS, find_file, find_trusted_file
from relay.config.model import NO_RULE_FOR_USER_EVENTS, Config
from relay.config.problems import ConfigInputs, describe_errors
from relay.errors import ConfigError
from relay.telemetry import LogFormat

__all__ = [
    "AGENT_EXAMPLE",
    "DEFAULTS",
    "NO_RULE_FOR_USER_EVENTS",
    "Config",
    "LoadedConfig",
    "find_log_format",
    "load",
    "sink_modules",
]

DEFAULTS = importlib.resources.files("relay") / "default.yaml"
"""The annotated document with every default. Without a document the defaults apply."""
AGENT_EXAMPLE = importlib.resources.files("relay") / "agent.yaml"
"""An annotated document for an agent of a fleet."""
COMMAND_LINE_VARIABLES = frozenset({"IMDS_RELAY_CONFIG", "IMDS_RELAY_URL", "IMDS_RELAY_KEY"})
"""Variables with the prefix that are no settings: the command line reads them."""


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A valid configuration, and what a reload needs to know of its file."""

    config: Config
    file: Path | None
    """None if only defaults and variables apply."""
    is_empty: bool = False
    """Whether the file has no keys. A reload may refuse it: somebody may just be writing it."""
    lines: Mapping[str, int] = field(default_factory=dict)
    """The line in the file of each of `RESTART_KEYS` that it has, for the refusal of a reload."""


def load(
    path: Path | None = None,
    environment: Mapping[str, str] = os.environ,
    *,
    default_paths: Sequence[Path] = DEFAULT_PATHS,
) -> LoadedConfig:
    """Find, read and check the document. Raises ConfigError with a line for each error."""
    file = find_trusted_file(path, environment, default_paths)
    document = read_document(file) if file is not None else {}
    values = expand_variables(file, document, environment)
    variables = {
        name: value
        for name, value in environment.items()
        if name.startswith(VARIABLE_PREFIX) and name not in COMMAND_LINE_VARIABLES
    }
    override_from_environment(values, variables)
    try:
        config = Config.model_validate(values)
    except ValidationError as error:
        inputs = ConfigInputs(
            file=file,
            document=document if file is not None else None,
            values=values,
            variables=variables,
        )
        raise ConfigError("\n".join(describe_errors(error, inputs))) from None
    lines = {key: line_of(document, tuple(key.split("."))) for key in RESTART_KEYS}
    return LoadedConfig(
        config,
        file,
        is_empty=file is not None and not document,
        lines={key: line for key, line in lines.items() if line is not None},
    )


def find_log_format(
    path: Path | None = None, environment: Mapping[str, str] = os.environ
) -> LogFormat:
    """Return ``telemetry.log``, or text if that cannot be read. Raises no ConfigError.

    ``imds-relay run`` calls it before `load`, so that errors in the configuration are logged in the
    form that the operator asked for.
    """
    form = environment.get("IMDS_RELAY_TELEMETRY__LOG")
    file = find_file(path, environment)
    if form is None and file is not None:
        with suppress(ConfigError):
            telemetry = read_document(file).get("telemetry")
            form = telemetry.get("log") if isinstance(telemetry, dict) else None
    return "json" if form == "json" else "text"
