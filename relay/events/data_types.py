"""The ``data`` of each type of CloudEvent: its fields, and what each of them means.

`relay.events.build` assigns these types to the CloudEvents, and makes JSON Schemas of them, with
the descriptions. The routes of the API answer with some of them. They are TypedDicts, because the
relay stores and sends ``data`` as a dictionary. No type accepts other fields (``_Strict``).
`Remarks` is what a caller may say with a decision, for the audit: nothing is decided by it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Required, cast

from pydantic import Field, with_config
from typing_extensions import TypedDict  # pydantic needs this one before Python 3.12


class Remarks(TypedDict):
    """Why somebody decided."""

    reason: Annotated[str | None, Field(description="the reason that the caller gave")]
    ticket: Annotated[
        str | None, Field(description="the change or ticket that the caller named, as CHG-1234")
    ]


def remarks_in(data: Mapping[str, Any]) -> Remarks:
    """Return the remarks among other fields; those that are not there are None."""
    return cast("Remarks", {name: data.get(name) for name in Remarks.__annotations__})


NO_REMARKS = remarks_in({})
_Strict = with_config({"extra": "forbid"})


def _says(description: str) -> Any:
    return Field(description=description)


_Resources = _says("names of all machines that the event concerns")
_CHANGED_TEXT = "name as in data, mapped to the value before; "
_ApprovedByRelay = Annotated[
    bool, _says("IMDS has accepted a StartRequest of this relay for the event")
]


@_Strict
class _AboutEvent(TypedDict):
    eventId: Annotated[
        str,
        _says(
            "Azure's identifier; for an unknown event as the caller wrote it, "
            "and the other fields are null"
        ),
    ]
    eventType: Annotated[
        str | None,
        _says("Freeze, Reboot, Redeploy, Preempt, Terminate, or a later addition of Azure"),
    ]
    eventStatus: Annotated[str | None, _says("Scheduled or Started, or a later addition of Azure")]
    resourceType: Annotated[str | None, _says("VirtualMachine, or a later addition of Azure")]
    resources: Annotated[list[str] | None, _Resources]
    notBefore: Annotated[
        str | None,
        _says(
            "RFC 3339: Azure does not start the event before this time; null once it has started"
        ),
    ]
    description: Annotated[str | None, _says("Azure's description, for people")]
    eventSource: Annotated[str | None, _says("Platform or User, or a later addition of Azure")]
    durationSeconds: Annotated[
        int | None, _says("announced length of the interruption in seconds; null: unknown")
    ]
    documentIncarnation: Annotated[
        int | None,
        _says(
            "DocumentIncarnation of the last document that held the event; a hint, it can decrease"
        ),
    ]
    revision: Annotated[str | None, _says("names the state that the decision is about")]


class EventData(_AboutEvent):
    """A scheduled event as Azure last described it."""

    eventId: Annotated[str, _says("Azure's identifier, in its original case; compare without case")]
    resources: Annotated[list[str], _Resources]  # type: ignore[misc]  # those of a known event
    revision: Annotated[  # type: ignore[misc]  # the same
        str, _says("names this state of the event; approvals refer to it")
    ]


class UpdatedData(EventData):
    """The changes of a known event."""

    changed: Annotated[
        dict[str, Any], _says(f"{_CHANGED_TEXT}never revision or documentIncarnation")
    ]


class StartedData(EventData):
    """The event has started."""

    changed: Annotated[
        dict[str, Any], _says(f"{_CHANGED_TEXT}empty if the event was first seen as Started")
    ]
    approvedByRelay: _ApprovedByRelay


class EndedData(EventData):
    """The event left Azure's document. The other fields are as last seen."""

    outcome: Annotated[
        Literal["completed", "canceled", "unknown"],
        _says("how the event ended, as far as this relay saw"),
    ]
    evidence: Annotated[
        Literal["observed", "rebooted", "none"], _says("what the outcome is based on")
    ]
    approvedByRelay: _ApprovedByRelay


_Ended = Annotated[
    list[str], _says("approvalId of each decision that counts no more because of this one")
]


@_Strict
class LimitWait(TypedDict):
    """A limit of approvals.limits for which an event waits."""

    limit: Annotated[str, _says("name of the limit")]
    max: Annotated[int, _says("how many machines may go at once")]
    machines: Annotated[
        list[str], _says("machines that take its slots; those of another scope as scope/name")
    ]
    behind: Annotated[
        str | None,
        _says(
            "the event that comes first: its EventId, on a hub <EventId>@<scope>; null if no slot "
            "is free"
        ),
    ]
    until: Annotated[
        str | None, _says("RFC 3339: when time alone frees a slot; null if that is not known")
    ]


@_Strict
class StandingHoldInForce(TypedDict):
    """A standing hold that keeps this relay from starting an event."""

    holdId: Annotated[str, _says("identifies the standing hold")]
    principal: Annotated[str, _says("who made it")]
    until: Annotated[str, _says("RFC 3339: when it expires")]
    reason: Annotated[str, _says("the reason that its author gave")]


class ApprovalData(_AboutEvent, Remarks):
    """A decision about an event, and the event at that time."""

    approvalId: Annotated[str, _says("identifies the decision, as in the response")]
    decision: Annotated[Literal["approve", "hold", "release"], _says("the requested decision")]
    principal: Annotated[
        str,
        _says(
            "who decided: client:<name>, local:<user>, vm:<scope>/<relay>, "
            "slack:<team>/<user> and so on, rule:<name> or relay"
        ),
    ]
    channel: Annotated[
        str,
        _says(
            "how the decision arrived: http, callback, amqp, local, fleet, slack, "
            "mattermost, rule or relay"
        ),
    ]
    votes: Annotated[int, _says("votes that count now; 0 for an automatic rule")]
    required: Annotated[int, _says("votes that the rule requires; 0 for an automatic rule")]
    rule: Annotated[str | None, _says("name of the rule that matches the event")]


class RecordedData(ApprovalData, total=False):
    """An accepted decision, and the event at that time."""

    expires: Annotated[
        str | None, _says("RFC 3339: when the decision stops counting; null: at NotBefore")
    ]
    ended: _Ended
    dryRun: Annotated[
        bool, _says("true in a dry run, outside which a vote does not count; else absent")
    ]
    notice: Annotated[
        str,
        _says(
            "only of a hold after an earlier StartRequest: Azure may have accepted that one, "
            "and the hold stops further ones"
        ),
    ]
    waitingFor: Annotated[
        list[LimitWait],
        _says(
            "the limits for which the event waits, if only they keep it from being granted; "
            "Azure proceeds at NotBefore regardless"
        ),
    ]
    standingHolds: Annotated[
        list[StandingHoldInForce],
        _says(
            "the standing holds that keep this relay from starting the event, if there are any; "
            "Azure proceeds at NotBefore regardless"
        ),
    ]


class RefusedData(ApprovalData):
    """A request of an authenticated caller that was refused."""

    refusal: Annotated[str, _says("the reason, as in the response")]


class VoidedData(_AboutEvent, total=False):
    """Recorded votes no longer count."""

    why: Annotated[
        Required[Literal["changed", "expired", "ended"]],
        _says("the event changed, the votes expired, or the event ended"),
    ]
    ended: _Ended
    waitedFor: Annotated[
        list[LimitWait], _says("the limits for which the event waited until the votes expired")
    ]


class ReminderData(_AboutEvent):
    """Votes are missing, and NotBefore is near."""

    votes: Annotated[int, _says("votes that count now")]
    required: Annotated[int, _says("votes that the rule requires")]
    missing: Annotated[int, _says("how many more votes are needed at least")]
    rule: Annotated[str, _says("name of the rule that matches the event")]
    mayVote: Annotated[
        list[str], _says("principals, or patterns over machines, whose votes would count")
    ]
    uncoveredResources: Annotated[
        list[str], _says("machines that nobody has voted for yet, with each_resource")
    ]
    closes: Annotated[str, _says("RFC 3339: when voting closes")]
    runbook: Annotated[str | None, _says("the runbook of the rule; null: it has none")]


@_Strict
class DurationCondition(TypedDict, total=False):
    """Bounds on the announced length, both included."""

    min: Annotated[str, _says("such as 8s")]
    max: Annotated[str, _says("such as 8s")]


@_Strict
class HoldConditions(TypedDict, total=False):
    """An absent condition is always met."""

    event_type: list[str]
    event_source: list[str]
    duration: DurationCondition
    resources: Annotated[list[str], _says("patterns; one matching resource is enough")]
    scope: Annotated[list[str], _says("patterns over the scope's name")]


@_Strict
class StandingHoldData(TypedDict):
    """A hold by conditions and for a time."""

    holdId: Annotated[str, _says("identifies the standing hold")]
    match: Annotated[HoldConditions, _says("which events it holds, also later ones")]
    starts: Annotated[str, _says("RFC 3339: from when it holds")]
    ends: Annotated[str, _says("RFC 3339: until when it holds")]
    principal: Annotated[str, _says("who made it")]
    channel: Annotated[str, _says("how it arrived: http or local")]
    reason: Annotated[str, _says("the reason that its author gave")]
    created: Annotated[str, _says("RFC 3339: when it was made")]
    notice: Annotated[str, _says("what it does not stop, for people")]


class EndedStandingHoldData(StandingHoldData):
    """A standing hold that somebody ended early."""

    endedBy: Annotated[str, _says("who ended it")]
    endReason: Annotated[str | None, _says("the reason that they gave")]


class StartRequestData(_AboutEvent):
    """The result of a StartRequest."""

    approvalId: Annotated[str, _says("that of the approval.granted that it follows")]
    status: Annotated[int | None, _says("HTTP status of the last response; null if there was none")]
    attempts: Annotated[int, _says("how often the StartRequest was sent")]
    reason: Annotated[str | None, _says("why the relay gave up")]


@_Strict
class RelayData(TypedDict):
    """A state of the relay itself or of one sink."""

    sink: Annotated[str | None, _says("the sink that the event is about; null if none")]
    reason: Annotated[str, _says("what happened, for people")]
    count: Annotated[int, _says("how many entries or messages the event is about")]
