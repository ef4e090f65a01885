"""The tables of a hub: its agents, and what each of them last said about each event.

`relay.fleet.hub` keeps here what it must know after a restart. On a relay that is no hub these
tables are empty.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

import orjson
from pydantic import Json, TypeAdapter

from relay.store.rows import parse_rows, save_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentRow:
    """An agent, as it last described itself (`relay.fleet.hub.roster.Agent`).

    ``relay`` is its name as a word of a routing key, ``name`` as it writes it. ``names`` are the
    names by which events refer to its VM, in lower case; none if no pulse had any. ``poll_age`` is
    how old its document was at its last pulse, and ``clock_offset`` how far its clock is ahead of
    Azure's, both in seconds. ``document_at`` is when it read the last document that a pulse told
    and that was merged, by the clock of IMDS.
    """

    scope: str
    relay: str
    user: str
    name: str
    vm_id: str | None = None
    version: str | None = None
    zone: str | None = None
    names: Json[tuple[str, ...]] = ()
    first_heard: datetime
    last_report: datetime | None = None
    last_pulse: datetime | None = None
    poll_age: float | None = None
    clock_offset: float | None = None
    document_at: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SightingRow:
    """What an agent last said about an event: a `relay.fleet.hub.merge.LastWord`.

    ``state`` is the digest of the state; None if the event is gone. ``seen`` is by the clock of
    IMDS. ``earlier``: it is about an earlier occurrence of the event.
    """

    event_key: str
    relay: str
    state: str | None
    seen: datetime
    earlier: bool
    rebooted: bool
    gap: bool


_AGENT = TypeAdapter(AgentRow)
_SIGHTING = TypeAdapter(SightingRow)


class FleetTables:
    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def agents(self) -> list[AgentRow]:
        rows = self._connection.execute("SELECT * FROM agent ORDER BY scope, relay")
        return list(parse_rows(_AGENT, rows))

    def save_agents(self, agents: Iterable[AgentRow]) -> None:
        save_rows(self._connection, "agent", list(agents), verb="INSERT OR REPLACE")

    def forget_agent(self, scope: str, relay: str) -> None:
        self._connection.execute("DELETE FROM agent WHERE scope = ? AND relay = ?", (scope, relay))
        self._connection.execute(
            "DELETE FROM sighting WHERE relay = ? "
            "AND event_key IN (SELECT key FROM occurrence WHERE scope = ?)",
            (relay, scope),
        )

    def sightings(self, event_keys: Sequence[str]) -> list[SightingRow]:
        rows = self._connection.execute(
            "SELECT * FROM sighting WHERE event_key IN (SELECT value FROM json_each(?))",
            (orjson.dumps(event_keys).decode(),),
        )
        return list(parse_rows(_SIGHTING, rows))

    def save_sightings(self, sightings: Iterable[SightingRow]) -> None:
        save_rows(self._connection, "sighting", list(sightings), verb="INSERT OR REPLACE")

    def prune_orphaned_sightings(self) -> None:
        self._connection.execute(
            "DELETE FROM sighting WHERE event_key NOT IN (SELECT key FROM occurrence)"
        )
