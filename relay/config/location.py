"""Finds the file of the configuration, and where its relay is: its local socket and its state file.

Whoever uses the values of the file calls `find_trusted_file`. The usual places include the current
folder, in which a stranger may have put a file. `find_file` skips this check, for those who only
choose the form of the log.

`locate_relay` reads ``api.socket`` and ``store.path`` only, for the command line: no secret, and no
variable of another key. So it works for users who cannot read the secrets of the relay, and while
somebody edits the configuration.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relay.config.document import expand_variables, override_from_environment, read_document
from relay.errors import ConfigError
from relay.files import is_planted, may_exist

SYSTEM_FILE = Path("/etc/imds-relay/relay.yaml")
"""The configuration of the service of a machine."""
DEFAULT_PATHS = (Path("relay.yaml"), SYSTEM_FILE)
"""Where the document is if no option or variable names it."""
_VARIABLES = ("API", "API__SOCKET", "STORE", "STORE__PATH")


def find_file(
    path: Path | None, environment: Mapping[str, str], default_paths: Sequence[Path] = DEFAULT_PATHS
) -> Path | None:
    """Return the file that an option or a variable names, else the first that exists."""
    if path is not None:
        return path
    if environment.get("IMDS_RELAY_CONFIG"):
        return Path(environment["IMDS_RELAY_CONFIG"])
    return next((place for place in default_paths if may_exist(place, stat.S_ISREG)), None)


def find_trusted_file(
    path: Path | None, environment: Mapping[str, str], default_paths: Sequence[Path] = DEFAULT_PATHS
) -> Path | None:
    """Return what `find_file` does. Raises ConfigError if a stranger put an unnamed file there."""
    file = find_file(path, environment, default_paths)
    is_named = path is not None or bool(environment.get("IMDS_RELAY_CONFIG"))
    if file is not None and not is_named:
        with suppress(OSError):  # whoever reads the file gets the reason
            if is_planted(file):
                raise ConfigError(
                    f"{file} is of another user, in a folder that others can write, so it is not "
                    f"used; to use it all the same: --config {file}"
                )
    return file


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
    path: Path | None = None,
    environment: Mapping[str, str] = os.environ,
    *,
    default_paths: Sequence[Path] = DEFAULT_PATHS,
) -> RelayLocation:
    """Return where it is. Raises ConfigError for an unusable file, or one that was planted."""
    file = find_trusted_file(path, environment, default_paths)
    document = read_document(file) if file is not None else {}
    values: dict[str, Any] = {}
    for section, key in (("api", "socket"), ("store", "path")):
        found = document.get(section)
        if isinstance(found, dict) and key in found:
            values |= expand_variables(file, {section: {key: found[key]}}, environment)
    variables = [f"IMDS_RELAY_{variable}" for variable in _VARIABLES]
    override_from_environment(
        values, {name: environment[name] for name in variables if name in environment}
    )
    return RelayLocation(
        file=file,
        socket=_value(values, "api", "socket", "auto"),
        store_path=Path(_value(values, "store", "path", "relay.db") or "relay.db"),
    )


def _value(values: Mapping[str, Any], section: str, key: str, default: str) -> str | None:
    """Return a text or null of the configuration. What `check` would refuse is the default."""
    found = values.get(section)
    value = found.get(key, default) if isinstance(found, dict) else default
    return value if value is None or (isinstance(value, str) and value) else default
