"""Profiles: files of a user that name a relay elsewhere, and the key for it.

A profile is the file ``<name>.yaml`` in the user's folder for configurations of this program. The
profile ``default`` applies where nothing else names a relay. `check_file_permissions` examines
profiles and the key files that they name.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from relay.cli._output import print_to_stderr
from relay.config.document import location_prefix, read_document
from relay.errors import ConfigError
from relay.files import describe_os_error, file_may_exist
from relay.suggestions import describe_choices

DEFAULT_PROFILE: Final = "default"
_KEYS: Final = ("url", "key_file", "ca_file")


@dataclass(frozen=True, slots=True)
class Profile:
    """A relay elsewhere, as a file of the user names it."""

    url: str
    key_file: Path | None
    ca_file: Path | None


def cli_profiles_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the folder of the profiles: that of the XDG Base Directory Specification.

    On Windows it is that of application data.
    """
    is_windows = sys.platform == "win32"
    base = environment.get("APPDATA" if is_windows else "XDG_CONFIG_HOME")
    if base and Path(base).is_absolute():
        return Path(base) / "imds-relay"
    return Path.home() / ".config" / "imds-relay"


def has_default_profile() -> bool:
    """Return whether there is a profile for the case that nothing names a relay.

    The home of another user, as after `sudo`, does not count.
    """
    return os.access(_profile_path(DEFAULT_PROFILE), os.R_OK)


def read_profile(name: str) -> Profile:
    """Return a profile. Relative paths in it begin at its folder. Raises ConfigError."""
    file = _profile_path(name)
    if not file_may_exist(file):
        raise ConfigError(f"--profile: {_describe_unknown_profile(name, file)}")
    check_file_permissions(file, "the profile", holds_secret=False)
    document = read_document(file)
    for key in document:
        if key not in _KEYS:
            raise ConfigError(
                f"{location_prefix(file, document, (key,))}unknown key; "
                f"{describe_choices(str(key), _KEYS)}"
            )
    values = {key: _optional_text_field(file, document, key) for key in _KEYS}
    if values["url"] is None:
        raise ConfigError(f"{file}: url: expected this key, but it is missing")
    return Profile(
        url=values["url"],
        key_file=_resolve_optional_path(file.parent, values["key_file"]),
        ca_file=_resolve_optional_path(file.parent, values["ca_file"]),
    )


def check_file_permissions(file: Path, what: str, *, holds_secret: bool) -> None:
    """Warn of a secret that everybody can read. Raises ConfigError if everybody can write the file.

    What cannot be examined is not judged: whoever opens the file gets the reason.
    """
    try:
        mode = file.stat().st_mode
    except OSError:
        return
    if sys.platform == "win32":
        return  # the mode of a file says nothing there
    if mode & stat.S_IWOTH:
        raise ConfigError(
            f"everybody on this machine can write {what} {file}, so it is not used: "
            f"chmod o-rwx {file}"
        )
    if mode & stat.S_IROTH and holds_secret:
        print_to_stderr(
            f"warning: everybody on this machine can read {what} {file}: chmod o-rwx {file}"
        )


def _profile_path(name: str) -> Path:
    if not name or name != Path(name).name or name.startswith("."):
        raise ConfigError(f"--profile: expected the name of a profile such as prod, got {name!r}")
    return cli_profiles_folder() / f"{name}.yaml"


def _describe_unknown_profile(name: str, file: Path) -> str:
    try:
        known = sorted(other.stem for other in file.parent.glob("*.yaml"))
    except OSError as error:
        return f"expected a file {file}: {describe_os_error(error)}"
    if not known:
        return f"expected a file {file}, and there are no profiles yet: see docs/cli.md"
    return f"expected a file {file}; {describe_choices(name, known)}"


def _optional_text_field(file: Path, document: Any, key: str) -> str | None:
    value = document.get(key)
    if value is not None and not isinstance(value, str):
        raise ConfigError(f"{location_prefix(file, document, (key,))}expected text")
    return value or None


def _resolve_optional_path(folder: Path, text: str | None) -> Path | None:
    return None if text is None else folder / Path(text).expanduser()
