"""Completes names in the shell: EventIds of the relay on this machine, sinks, types, profiles.

Whatever goes wrong, nothing is completed and nothing is printed. A relay elsewhere is not asked: a
key goes out only when a verb runs.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from pathlib import Path
from typing import Any

import typer

from relay.cli._connection import connect_locally
from relay.cli._connection_profiles import cli_profiles_folder, has_default_profile
from relay.config.document import read_document
from relay.config.file_lookup import find_file
from relay.config.relay_location import locate_relay_addresses_and_state_file
from relay.events.catalog import CATALOG
from relay.simulator import load_packaged_playbooks

_TIMEOUT = 2.0


def _make_completion_of_names(
    names: Callable[[typer.Context], Iterable[str]],
) -> Callable[[typer.Context, str], list[str]]:
    """Make a completion of a function that returns all names. Errors complete nothing."""

    @wraps(names)
    def complete(context: typer.Context, incomplete: str) -> list[str]:
        try:
            known = list(names(context))
        except Exception:  # noqa: BLE001  # a shell that completes must show no error
            return []
        # Typer leaves out what does not begin as the word on the command line, with its case.
        return [
            incomplete + name[len(incomplete) :]
            for name in known
            if name.lower().startswith(incomplete.lower())
        ]

    return complete


@_make_completion_of_names
def event_ids(context: typer.Context) -> Iterable[str]:
    """Return the EventIds of current and recent events."""
    if context.params.get("url") or context.params.get("profile"):
        return []
    location = locate_relay_addresses_and_state_file(_config_option(context))
    if not location.is_own and has_default_profile():
        return []

    async def fetch() -> Mapping[str, Any]:
        async with asyncio.timeout(_TIMEOUT), connect_locally(location) as client:
            page: Mapping[str, Any] = await client.get("events")
            return page

    return dict.fromkeys(event["eventId"] for event in asyncio.run(fetch())["items"])


@_make_completion_of_names
def sinks(context: typer.Context) -> Iterable[str]:
    """Return the names of the sinks in the configuration, if this user may read it."""
    file = find_file(_config_option(context), os.environ)
    document = {} if file is None else read_document(file)
    return [sink["name"] for sink in document["sinks"]]


@_make_completion_of_names
def event_types(_: typer.Context) -> Iterable[str]:
    """Return the types of CloudEvents without prefix and version."""
    return [definition.name for definition in CATALOG]


@_make_completion_of_names
def schemas(_: typer.Context) -> Iterable[str]:
    """Return what ``schema`` can print."""
    return [*(definition.name for definition in CATALOG), "slack-manifest"]


@_make_completion_of_names
def playbooks(_: typer.Context) -> Iterable[str]:
    """Return the playbooks of the package."""
    return load_packaged_playbooks()


@_make_completion_of_names
def profiles(_: typer.Context) -> Iterable[str]:
    """Return the user's profiles."""
    return sorted(file.stem for file in cli_profiles_folder().glob("*.yaml"))


def _config_option(context: typer.Context) -> Path | None:
    value = context.params.get("config")
    return None if value is None else Path(value)
