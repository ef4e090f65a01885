"""Standing holds: a fold of the journal's ``standing-hold.*`` rows, as `approvals` is of others.

A standing hold keeps all events that meet its conditions from a grant, for a time.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from pydantic import TypeAdapter

from relay.errors import StoreError
from relay.events.cloudevent import CloudEvent
from relay.events.timestamps import parse_timestamp
from relay.store import StandingHold
from relay.store.journal import STANDING_HOLD_ROWS, Journal, JournalRow
from relay.store.rows import PageLimit, take_page

CREATED, ENDED, EXPIRED = (f"standing-hold.{change}" for change in ("created", "ended", "expired"))
MAX_OVER = 1000
"""Standing holds that are over and still listed; the journal has all of them."""
_STANDING_HOLD = TypeAdapter(StandingHold)
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FoldedHolds:
    """What the rows up to a position say: every standing hold by its id, oldest first."""

    position: int = 0
    by_id: Mapping[str, StandingHold] = field(default_factory=dict)
    open: tuple[StandingHold, ...] = ()


NO_HOLDS = FoldedHolds()


@dataclass(slots=True)
class HoldMemory:
    damaged: dict[str | None, str] = field(default_factory=dict)
    """Why approvals are off until the next start, because rows of the journal cannot be trusted: by
    the key of their event; None: all. All copies share it: what is rolled back was found, too."""
    holds: FoldedHolds = NO_HOLDS


class StandingHolds:
    def __init__(self, journal: Journal, memory: HoldMemory) -> None:
        self._journal = journal
        self._memory = memory

    @property
    def damage(self) -> str | None:
        """Why all approvals are off: rows of the journal that cannot be trusted."""
        self._folded()
        return self._memory.damaged.get(None)

    def list_open(self) -> tuple[StandingHold, ...]:
        """Return the standing holds that were not ended and did not expire, oldest first.

        While none changes, this returns the same object.
        """
        return self._folded().open

    def find(self, hold_id: str) -> StandingHold | None:
        return self._folded().by_id.get(hold_id)

    def page(
        self, before: int | None, limit: PageLimit, *, only_open: bool
    ) -> tuple[list[StandingHold], bool]:
        """Return the newest standing holds before a position, newest first; True: more are left."""
        folded = self._folded()
        holds = folded.open if only_open else tuple(folded.by_id.values())
        older = (hold for hold in reversed(holds) if before is None or hold.position < before)
        return take_page(older, _size, limit)

    def verify(self) -> None:
        """Read and verify all rows again, and compare: what is pruned shows nothing any more."""
        known = self._folded()
        try:
            again = self._fold(NO_HOLDS)
        except StoreError as error:
            self._set_damage(str(error))
            return
        if again.open != known.open:
            self._set_damage("journal: rows of standing holds were changed or removed")

    def forget_pruned(self) -> None:
        self._memory.holds = NO_HOLDS

    def _folded(self) -> FoldedHolds:
        memory, end = self._memory, self._journal.head().position
        if memory.holds.position != end:
            try:
                memory.holds = self._fold(memory.holds)
            except StoreError as error:
                self._set_damage(str(error))
                memory.holds = replace(memory.holds, position=end)
        return memory.holds

    def _set_damage(self, damage: str) -> None:
        if None not in self._memory.damaged:
            _log.error("approvals are off, because standing holds cannot be read: %s", damage)
            self._memory.damaged[None] = damage

    def _fold(self, known: FoldedHolds) -> FoldedHolds:
        end = self._journal.head().position
        by_id = self._journal.fold(
            dict(known.by_id), _add, STANDING_HOLD_ROWS, after=known.position
        )
        if by_id == known.by_id:  # `list_open` returns the same object
            return replace(known, position=end)
        over = [hold_id for hold_id, hold in by_id.items() if hold.ended is not None]
        for hold_id in over[: max(0, len(over) - MAX_OVER)]:
            del by_id[hold_id]
        is_open = tuple(hold for hold in by_id.values() if hold.ended is None)
        return FoldedHolds(end, by_id, is_open)


def _add(by_id: dict[str, StandingHold], row: JournalRow) -> dict[str, StandingHold]:
    event = CloudEvent.parse(row.body)
    data, hold_id = event.data, event.data["holdId"]
    if row.kind == CREATED:
        fields = {"hold_id": hold_id, "conditions": data["match"], "position": row.position}
        by_id[hold_id] = _STANDING_HOLD.validate_python({**data, **fields})
    elif hold_id in by_id:  # otherwise it was pruned
        ended = parse_timestamp(event.attributes["time"])
        by_id[hold_id] = replace(by_id[hold_id], ended=ended, ended_by=data.get("endedBy"))
    return by_id


def _size(hold: StandingHold) -> int:
    return len(hold.reason) + len(hold.conditions.model_dump_json(exclude_unset=True))
