"""Finds, reads and checks the configuration. Environment variables override the YAML document.

Each error of a ConfigError names the file with its line or the variable, the key path, what was
expected and what was there. It shows no secret.
"""

from __future__ import annotations

import functools
import importlib.resources
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, SecretStr, ValidationError

from relay.config.changes import RESTART_KEYS
from relay.config.document import (
    VARIABLE_PREFIX,
    expand_variables,
    line_of,
    override_values,
    read_document,
)
from relay.config.file import DEFAULT_PATHS, find_trusted_file
from relay.config.kinds import load_kinds, sink_modules
from relay.config.log_format import find_log_format
from relay.config.model import NO_RULE_FOR_USER_EVENTS, Config
from relay.config.problems import ConfigInputs, describe_errors
from relay.errors import ConfigError

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
    """A valid configuration and its file. The file is None if only defaults and variables apply."""

    config: Config
    file: Path | None
    is_empty: bool = False
    """Whether the file has no keys."""
    lines: Mapping[str, int] = field(default_factory=dict)
    """The line in the file of each key that needs a restart, and that the file has."""


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
    override_values(values, variables)
    try:
        config = Config.model_validate(values)
        is_empty = file is not None and not document
        lines = {key: line_of(document, tuple(key.split("."))) for key in RESTART_KEYS}
        return LoadedConfig(
            config, file, is_empty, {key: line for key, line in lines.items() if line is not None}
        )
    except ValidationError as error:
        config_input = ConfigInputs(
            file=file,
            document=document if file is not None else None,
            values=values,
            variables=variables,
            secret_keys=_secret_keys(),
            sink_kinds=sink_modules(),
            root=Config,
            broken_kinds={plugin.name: plugin.problem for plugin in load_kinds().broken},
        )
        raise ConfigError("\n".join(describe_errors(error, config_input))) from None


@functools.cache
def _secret_keys() -> frozenset[str]:
    """Return the keys that hold secrets, in any section."""
    keys = {"key_sha256"}  # people put the key itself here by mistake
    sections: list[type[BaseModel]] = [Config]
    for section in sections:  # grows by the sections inside, which may contain themselves
        for name, info in section.model_fields.items():
            for inner in _nested_types(info.annotation):
                if inner is SecretStr:
                    keys.add(name)
                elif _is_section(inner) and inner not in sections:
                    sections.append(inner)
    return frozenset(keys)


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _nested_types(annotation: Any) -> Iterator[Any]:
    """Yield an annotation and every annotation inside it."""
    yield annotation
    for argument in getattr(annotation, "__args__", ()):
        yield from _nested_types(argument)
