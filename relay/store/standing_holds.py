"""Standing holds: a fold of the journal's ``standing-hold.*`` rows, as `approvals` is of others.

A standing hold keeps all events that meet its conditions from a grant, for a time.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from pydantic import TypeAdapter

from relay.events.cloudevent import CloudEvent
from relay.events.timestamps import parse_timestamp
from relay.store import StandingHold
from relay.store.chain import JournalRow
from relay.store.journal import STANDING_HOLD_ROWS, Folded, Journal
from relay.store.rows import PageLimit, take_page

CREATED, ENDED, EXPIRED = (f"standing-hold.{change}" for change in ("created", "ended", "expired"))
MAX_OVER = 1000
"""Standing holds that are over and still listed; the journal has all of them."""
_STANDING_HOLD = TypeAdapter(StandingHold)
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FoldedHolds(Folded):
    """Every standing hold by its id, oldest first."""

    by_id: Mapping[str, StandingHold] = field(default_factory=dict)
    open: tuple[StandingHold, ...] = ()


NO_HOLDS = FoldedHolds()


@dataclass(slots=True)
class HoldCache:
    damage: str | None = None
    """What was wrong with the journal at the start. Then approvals are off until the next one."""
    holds: FoldedHolds = NO_HOLDS
    pruned_to: int = 0
    """The checkpoint of the journal when this was folded. A pruning can be rolled back."""


class StandingHolds:
    def __init__(self, journal: Journal, cache: HoldCache) -> None:
        self._journal = journal
        self._cache = cache

    @property
    def damage(self) -> str | None:
        """Why all approvals are off: rows of the journal that cannot be trusted."""
        return self._cache.damage or self._folded().damage

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

    def first_open_position(self) -> int | None:
        """Return where the oldest standing hold that is not over is in the journal."""
        return min((hold.position for hold in self.list_open()), default=None)

    def read_again(self) -> None:
        """Read and verify all rows again, and compare: later nobody knows what they said before."""
        known = self._folded()
        if known.damage is None:
            self._cache.holds = NO_HOLDS
            again = self._folded()
            if again.damage is None and again.open != known.open:
                damage = f"journal: rows before position {known.position} were changed or removed"
                self._keep(FoldedHolds(again.position, again.hash, damage))

    def _folded(self) -> FoldedHolds:
        known = self._cache.holds
        folded = self._journal.fold_newer(known, NO_HOLDS, self._fold, STANDING_HOLD_ROWS)
        return folded if folded is known else self._keep(folded)

    def _keep(self, folded: FoldedHolds) -> FoldedHolds:
        self._cache.holds = folded
        if folded.damage is not None:
            _log.error(
                "approvals are off, because standing holds cannot be read: %s", folded.damage
            )
        return folded

    def _fold(self, before: FoldedHolds, rows: Iterable[JournalRow]) -> FoldedHolds:
        by_id = dict(before.by_id)
        for row in rows:
            if before is NO_HOLDS and not by_id:  # all are read again, and none may be missing
                self._journal.require_no_gap(1)
            event = CloudEvent.parse(row.body)
            hold_id = event.data["holdId"]
            if row.kind == CREATED:
                by_id[hold_id] = _hold_of(row.position, event)
            elif hold_id in by_id:  # otherwise it was pruned
                ended = parse_timestamp(event.attributes["time"])
                by_id[hold_id] = replace(
                    by_id[hold_id], ended=ended, ended_by=event.data.get("endedBy")
                )
        over = [hold_id for hold_id, hold in by_id.items() if hold.ended is not None]
        for hold_id in over[: max(0, len(over) - MAX_OVER)]:
            del by_id[hold_id]
        is_open = tuple(hold for hold in by_id.values() if hold.ended is None)
        return FoldedHolds(by_id=by_id, open=is_open)


def _hold_of(position: int, event: CloudEvent) -> StandingHold:
    data = event.data
    fields = {"hold_id": data["holdId"], "conditions": data["match"], "position": position}
    return _STANDING_HOLD.validate_python({**data, **fields})


def _size(hold: StandingHold) -> int:
    return len(hold.reason) + len(hold.conditions.model_dump_json(exclude_unset=True))
