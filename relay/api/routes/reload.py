"""`/v1/reload`: reads the configuration again, and takes it over."""

from __future__ import annotations

from typing import Any, Literal

from typing_extensions import TypedDict

from relay.api.schema.responses import Problem
from relay.api.schema.route import Call, Route
from relay.errors import ReloadRefused


class ChangedKey(TypedDict):
    """A key of the configuration whose value has changed."""

    key: str
    """Entries of a list that have names are keys too: `sinks.bus`."""
    change: Literal["added", "changed", "removed", "moved"]


class ConfigurationReloaded(TypedDict):
    """The configuration is in force."""

    changes: list[ChangedKey]
    """Empty if nothing has changed."""


async def _reload(call: Call) -> ConfigurationReloaded:
    _ = call.relay  # 503 while it starts or stops
    if call.server.reloader is None:
        raise Problem(503, "the relay is starting, or was not started by `imds-relay run`")
    try:
        changes = await call.server.reloader.reload(call.caller.principal)
    except ReloadRefused as error:
        if error.is_stopping:
            raise Problem(503, "the relay is starting or stopping; try again") from None
        members: dict[str, Any] = {}
        if error.restart_keys:
            members["restartRequired"] = list(error.restart_keys)
        raise Problem(422, error.reason, **members) from None
    return ConfigurationReloaded(
        changes=[ChangedKey(key=change.key, change=change.kind) for change in changes]
    )


ROUTES = (
    Route(
        method="POST",
        path="/v1/reload",
        summary="read the configuration again and take it over; if it cannot be, the earlier one "
        "stays in force",
        handler=_reload,
        needs="operate",
        problem_statuses=(422,),
    ),
)
