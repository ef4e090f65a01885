"""Reads where the relay of a configuration is: its local socket, its listener and its state file.

The command line uses it to call the relay of this machine, and to open its state file. It reads
these keys only: no secret, and no variable of another key. It accepts a configuration with which
the relay would not start. So the command line works for users who cannot read the secrets of the
relay, and while somebody edits the configuration.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from relay.config.document import (
    apply_environment_overrides_in_place,
    expand_variables,
    read_document,
)
from relay.config.file_lookup import DEFAULT_PATHS, SERVICE_STORE, find_trusted_file
from relay.errors import ConfigError
from relay.files import may_exist

_PLACES = ("api.socket", "api.listen", "api.tls", "store.path")
_VARIABLES = ("API", "API__SOCKET", "API__LISTEN", "API__TLS", "STORE", "STORE__PATH")
_DEFAULT_LISTEN = "127.0.0.1:8080"
_DEFAULT_STATE_FILE = Path("relay.db")
_LOOPBACK_OF_WILDCARD = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}  # noqa: S104


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayAddressesAndStateFile:
    """Where the relay of a configuration is."""

    file: Path | None
    """None if there is no file."""
    problems: tuple[str, ...]
    """What could not be read. The defaults are used in its place."""
    socket: Path | Literal["auto"] | None
    """``api.socket``. ``auto``, the default: beside the state file or in the folder of the service,
    see `relay.api.local_socket`. None: the relay has no local socket."""
    state_files: tuple[Path, ...]
    """Where the state file may be. A relative ``store.path`` begins at the folder in which the
    relay runs: this one, that of the file, or that of the service unless another file is meant.
    Empty: ``store.path`` could not be read."""
    is_own: bool
    """Whether the user named the file, or is in the folder of the file. If not, the file is that of
    the service, or there is none. Verbs then prefer the relay that the profile of the user names,
    if there is a profile (`relay.cli._connection_profiles`)."""
    url: str
    """The URL of the listener, from this machine."""

    def state_file(self) -> Path:
        """Return the state file that is there; if none is, the first that could be.

        Raises ConfigError if the file of the user leaves open which one is meant. Whoever guesses
        then would verify the journal of another relay, or ask it.
        """
        if not self.state_files:
            raise ConfigError("\n".join(self.problems))
        there = {os.path.realpath(file): file for file in self.state_files if may_exist(file)}
        if self.is_own and len(there) > 1:
            raise ConfigError(
                f"{self.file}: store.path begins at the folder in which the relay runs, and there "
                f"are {' and '.join(there)}: make it an absolute path"
            )
        return next(iter(there.values()), self.state_files[0])


def locate_relay_addresses_and_state_file(
    path: Path | None = None,
    environment: Mapping[str, str] = os.environ,
    *,
    default_paths: Sequence[Path] = DEFAULT_PATHS,
    service_folder: Path = SERVICE_STORE.parent,
) -> RelayAddressesAndStateFile:
    """Return where the relay is.

    Raises ConfigError if the file that somebody named is unusable, or a stranger planted the file.
    """
    file = find_trusted_file(path, environment, default_paths)
    is_named = path is not None or bool(environment.get("IMDS_RELAY_CONFIG"))
    document: Any = {}
    problems: list[str] = []
    if file is not None:
        try:
            document = read_document(file)
        except ConfigError as error:
            if is_named:
                raise
            problems.append(str(error))
    values, unreadable = _read_places(file, document, environment)
    api, store = values.get("api"), values.get("store")
    api = api if isinstance(api, dict) else {}
    # A link to the file of the service counts as that file.
    is_of_service = file is None or os.path.realpath(file) in map(
        os.path.realpath, default_paths[1:]
    )
    is_own = is_named or not is_of_service
    folders = [Path()]
    if file is not None and is_own:
        folders.append(file.parent)
    if is_of_service:
        folders.append(service_folder)
    state_file = _path_or_none(store.get("path") if isinstance(store, dict) else None)
    if state_file is None:
        state_file = _DEFAULT_STATE_FILE
        folders = [] if "store.path" in unreadable else folders
    return RelayAddressesAndStateFile(
        file=file,
        problems=(*problems, *unreadable.values()),
        socket=_socket_setting(api),
        state_files=tuple(dict.fromkeys(folder / state_file for folder in folders)),
        is_own=is_own,
        url=_listener_url(api),
    )


def _read_places(
    file: Path | None, document: Any, environment: Mapping[str, str]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the sections with these keys, and why a place could not be read."""
    values: dict[str, Any] = {}
    problems: dict[str, str] = {}
    for place in _PLACES:
        section, key = place.split(".")
        found = document.get(section)
        if isinstance(found, dict) and key in found:
            try:
                part = expand_variables(file, {section: {key: found[key]}}, environment)
            except ConfigError as error:
                problems[place] = str(error)
            else:
                values.setdefault(section, {})[key] = part[section][key]
    variables = [f"IMDS_RELAY_{variable}" for variable in _VARIABLES]
    try:
        apply_environment_overrides_in_place(
            values, {name: environment[name] for name in variables if name in environment}
        )
    except ConfigError as error:
        problems["environment"] = str(error)
    return values, problems


def _path_or_none(value: object) -> Path | None:
    return Path(value) if isinstance(value, str) and value else None


def _socket_setting(api: Mapping[str, Any]) -> Path | Literal["auto"] | None:
    value = api.get("socket", "auto")
    if value is None:
        return None
    return "auto" if value == "auto" else _path_or_none(value) or "auto"


def _listener_url(api: Mapping[str, Any]) -> str:
    listen = api.get("listen")
    listen = listen if isinstance(listen, str) and ":" in listen else _DEFAULT_LISTEN
    host, _, port = listen.rpartition(":")
    scheme = "http" if api.get("tls") is None else "https"
    return f"{scheme}://{_LOOPBACK_OF_WILDCARD.get(host, host)}:{port}"
