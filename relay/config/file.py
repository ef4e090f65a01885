"""Finds the file of the configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from relay.files import may_be_file

SYSTEM_FILE = Path("/etc/imds-relay/relay.yaml")
"""The configuration of the service of a machine."""
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
    return next((place for place in default_paths if may_be_file(place)), None)
