"""Standing holds: a fold of the journal's ``standing-hold.*`` rows, as `approvals` is of others.

A standing hold keeps all events that meet its conditions from a grant, for a time.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime

import orjson

from relay.errors import StoreError
from relay.events.cloudevent import CloudEvent
from relay.events.timestamps import parse_timestamp
from relay.store import StandingHold
from relay.store.journal import STANDING_HOLD_ROWS, Journal, JournalRow
from relay.store.rows import PageLimit, take_page

CREATED, ENDED, EXPIRED = (f"standing-hold.{change}" for change in ("created", "ended", "expired"))
"""The names of the events about a standing hold."""
MAX_OVER = 1000
"""Standing holds that are over and still listed; the journal has all of them."""
VALUE_ERRORS = (ValueError, LookupError, TypeError, AttributeError, AssertionError)
"""What reading a row raises that is not what the relay writes."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FoldedHolds:
    """Every standing hold by its id, oldest first, up to the row with this position and hash."""

    position: int = 0
    hash: str = ""
    by_id: Mapping[str, StandingHold] = field(default_factory=dict)
    open: tuple[StandingHold, ...] = ()
    damage: str | None = None
    """Why the rows cannot be trusted. Then approvals are off."""


NO_HOLDS = FoldedHolds()


@dataclass(slots=True)
class HoldCache:
    """What was folded, for all transactions of a store. It counts while the newest row is its."""

    folded: FoldedHolds = NO_HOLDS


class StandingHolds:
    """Reads what the journal says about standing holds, inside a transaction."""

    def __init__(self, journal: Journal, cache: HoldCache) -> None:
        self._journal = journal
        self._cache = cache
        self._checked: int | None = None
        """Where the journal ended when its newest row was looked at."""

    @property
    def damage(self) -> str | None:
        """Why the rows cannot be trusted, if they cannot."""
        return self._folded().damage

    def list_open(self) -> tuple[StandingHold, ...]:
        """Return the standing holds that were not ended and did not expire, oldest first.

        While none changes, this returns the same object.
        """
        return self._folded().open

    def find(self, hold_id: str) -> StandingHold | None:
        """Return a standing hold, also one that is over."""
        return self._folded().by_id.get(hold_id)

    def page(
        self, before: int | None, limit: PageLimit, *, only_open: bool
    ) -> tuple[list[StandingHold], bool]:
        """Return the newest standing holds with a position less than ``before``, newest first.

        The second value says whether there are more.
        """
        folded = self._folded()
        holds = folded.open if only_open else tuple(folded.by_id.values())
        older = (hold for hold in reversed(holds) if before is None or hold.position < before)
        return take_page(
            older, lambda hold: len(hold.conditions + hold.within + hold.reason), limit
        )

    def count_created(self, principal: str, since: datetime, until: datetime) -> int:
        """Return how many standing holds a principal made after ``since`` and before ``until``."""
        return sum(
            hold.principal == principal and since < hold.created < until
            for hold in self._folded().by_id.values()
        )

    def first_open_position(self) -> int | None:
        """Return where the oldest standing hold that is not over is in the journal."""
        return min((hold.position for hold in self.list_open()), default=None)

    def _folded(self) -> FoldedHolds:
        known, end = self._cache.folded, self._journal.head().position
        if self._checked == end:
            return known
        self._checked = end
        newest = self._journal.newest_of(STANDING_HOLD_ROWS)
        if newest is None:
            self._cache.folded = NO_HOLDS
            return NO_HOLDS
        if (known.position, known.hash) != newest:
            if known.damage is not None or not self._journal.holds(known.position, known.hash):
                known = NO_HOLDS
            known = self._cache.folded = self._fold(known, newest)
        return known

    def _fold(self, known: FoldedHolds, newest: tuple[int, str]) -> FoldedHolds:
        by_id, position = dict(known.by_id), known.position
        try:
            for row in self._journal.verified_rows(STANDING_HOLD_ROWS, after=known.position):
                if not position:  # nothing is known yet
                    self._journal.require_no_gap(row.position, self._journal.head().position)
                position = row.position
                _apply(by_id, row)
        except StoreError as error:
            damage = str(error)
        except VALUE_ERRORS as error:
            text = f"{type(error).__name__}: {error}"
            damage = f"journal: the row at position {position} cannot be read ({text})"
        else:
            over = [hold_id for hold_id, hold in by_id.items() if hold.ended is not None]
            for hold_id in over[: max(0, len(over) - MAX_OVER)]:
                del by_id[hold_id]
            is_open = tuple(hold for hold in by_id.values() if hold.ended is None)
            return FoldedHolds(*newest, by_id=by_id, open=is_open)
        _log.error("approvals are off, because standing holds cannot be read: %s", damage)
        return FoldedHolds(*newest, damage=damage)


def _apply(by_id: dict[str, StandingHold], row: JournalRow) -> None:
    event = CloudEvent.parse(row.body)
    data = event.data
    if row.kind == CREATED:
        by_id[data["holdId"]] = _hold_of(row.position, event)
        return
    hold = by_id.get(data["holdId"])
    if hold is not None:  # otherwise it was pruned
        ended = parse_timestamp(event.attributes["time"])
        by_id[hold.hold_id] = replace(hold, ended=ended, ended_by=data.get("endedBy"))


def _hold_of(position: int, event: CloudEvent) -> StandingHold:
    """Return the standing hold that a ``standing-hold.created`` tells of."""
    data = event.data
    starts, ends, created = (parse_timestamp(data[key]) for key in ("starts", "ends", "created"))
    assert starts is not None  # noqa: S101  # `relay.approvals` wrote these times
    assert ends is not None  # noqa: S101
    assert created is not None  # noqa: S101
    return StandingHold(
        hold_id=data["holdId"],
        conditions=orjson.dumps(data["match"]).decode(),
        within=orjson.dumps(data.get("within", [])).decode(),
        starts=starts,
        ends=ends,
        principal=data["principal"],
        channel=data["channel"],
        reason=data["reason"],
        created=created,
        position=position,
    )
