"""Finds the file of the configuration: the named one, else the first of the usual places.

Whoever uses the values calls `find_trusted_file`. The usual places include the current folder, in
which a stranger may have put a file. `find_file` skips this check, for those who only complete a
name or choose the form of the log.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from relay.errors import ConfigError
from relay.files import file_may_exist, is_planted

SYSTEM_FILE = Path("/etc/imds-relay/relay.yaml")
"""The configuration of the service of a machine."""
SERVICE_STORE = Path("/var/lib/imds-relay/relay.db")
"""The state file of the service: the unit file and the image set it."""
DEFAULT_PATHS = (Path("relay.yaml"), SYSTEM_FILE)
"""Where the document is if no option or variable names it."""


def find_file(
    path: Path | None, environment: Mapping[str, str], default_paths: Sequence[Path] = DEFAULT_PATHS
) -> Path | None:
    """Return the file that an option or a variable names, else the first that exists."""
    if path is not None:
        return path
    if environment.get("IMDS_RELAY_CONFIG"):
        return Path(environment["IMDS_RELAY_CONFIG"])
    return next((place for place in default_paths if file_may_exist(place)), None)


def find_trusted_file(
    path: Path | None, environment: Mapping[str, str], default_paths: Sequence[Path] = DEFAULT_PATHS
) -> Path | None:
    """Return what `find_file` returns.

    Raises ConfigError for a file that nobody named, and that a stranger put there.
    """
    file = find_file(path, environment, default_paths)
    if file is None or path is not None or environment.get("IMDS_RELAY_CONFIG"):
        return file
    try:
        planted = is_planted(file)
    except OSError:
        return file  # whoever reads it gets the reason
    if planted:
        raise ConfigError(
            f"{file} is of another user, in a folder that others can write, so it is not used; "
            f"to use it all the same: --config {file}"
        )
    return file
