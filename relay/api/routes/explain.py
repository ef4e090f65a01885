"""``/v1/events/{eventId}/rule``: which rule decides about an event, what is missing, and until when."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from aiohttp import web
from typing_extensions import TypedDict

from relay.api.schema.problems import Problem
from relay.api.schema.responses import json_response
from relay.api.schema.route import Call, Route
from relay.approvals.authorize import HOLD_NOTICE
from relay.approvals.explain import ApprovalExplanation, explain
from relay.approvals.status import ApprovalState
from relay.events.timestamps import format_rfc3339
from relay.outbox import Mode
from relay.outbox.transaction import Transaction


class RuleShown(TypedDict):
    """One rule of approvals.rules, in their order: the first whose conditions are met decides."""

    name: str
    unmet: list[str]
    """The keys of its match that the event does not meet now."""
    decides: bool
    turns: str | None
    """RFC 3339: when its hours begin or end next."""


class Counting(TypedDict):
    """A vote that counts, or a hold that holds."""

    principal: str
    until: str | None
    """RFC 3339; null: until NotBefore."""


class WeighedShown(TypedDict):
    """How the approval of an event is weighed now."""

    eventId: str
    revision: str
    notBefore: str | None
    state: ApprovalState
    mode: Mode
    rule: str | None
    rules: list[RuleShown]
    votes: int
    required: int
    missing: int
    mayVote: list[str]
    """Whose votes would count towards what is missing."""
    unspoken: list[str]
    """Machines for which somebody has yet to speak."""
    closes: str | None
    """RFC 3339: when voting closes."""
    voted: list[Counting]
    holds: list[Counting]
    holdMeans: str
    lapses: str | None
    """RFC 3339: when what was granted expires unless it is sent."""


async def _find(call: Call) -> dict[str, Any]:
    ledger = call.relay.gate.service
    key = call.request.match_info["eventId"].lower()

    def work(tx: Transaction) -> dict[str, Any] | None:
        occurrence = tx.snapshot.find(key)
        if occurrence is None:
            return None
        standing = ledger.status(tx, occurrence, call.relay.clock.now())
        weighed = explain(standing, ledger.settings.rules, ledger.origin.scope)
        about = {name: occurrence.data[name] for name in ("eventId", "revision", "notBefore")}
        return {
            **about,
            "rule": standing.rule.name if standing.rule is not None else None,
            **_shown(weighed),
        }

    found = await call.relay.store.read(work)
    if found is None:
        raise Problem(
            404, "no such event in this scope; see GET /v1/events, or `imds-relay events`"
        )
    return found


def _shown(weighed: ApprovalExplanation) -> dict[str, Any]:
    return {
        "state": weighed.state,
        "mode": weighed.mode,
        "rules": [
            {
                "name": one.name,
                "unmet": list(one.unmet_conditions),
                "decides": one.decides,
                "turns": _moment(one.hours_change_at),
            }
            for one in weighed.rules
        ],
        "votes": weighed.votes,
        "required": weighed.required,
        "missing": weighed.missing,
        "mayVote": list(weighed.may_vote),
        "unspoken": list(weighed.uncovered_resources),
        "closes": _moment(weighed.voting_closes_at),
        "voted": _counting(weighed.counted_votes),
        "holds": _counting(weighed.holds),
        "holdMeans": HOLD_NOTICE,
        "lapses": _moment(weighed.grant_expires_at),
    }


def _counting(those: tuple[tuple[str, datetime | None], ...]) -> list[dict[str, str | None]]:
    return [{"principal": principal, "until": _moment(until)} for principal, until in those]


def _moment(moment: datetime | None) -> str | None:
    return format_rfc3339(moment) if moment is not None else None


async def _show(call: Call) -> web.StreamResponse:
    return json_response(200, call.found)


ROUTES = (
    Route(
        "GET",
        "/v1/events/{eventId}/rule",
        "which rule decides about an event, what is missing, and until when",
        _show,
        {200: WeighedShown},
        needs="read",
        lookup=_find,
    ),
)
