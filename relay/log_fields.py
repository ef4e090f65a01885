"""The fields of log lines: what a line says, for programs and for searches.

A field has the same name and meaning in every line, see docs/log.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from typing_extensions import Unpack

FIELDS: Mapping[str, str] = {
    "type": "what happened: `<family>.<change>` of the CloudEvent",
    "id": "id of the CloudEvent",
    "position": "its position in the journal",
    "eventId": "Azure's identifier of the scheduled event, in its original case",
    "scope": "the group of VMs that read the same document",
    "relay": "the relay that says it",
    "eventType": "Freeze, Reboot, Redeploy, Preempt, Terminate, or a later addition of Azure",
    "eventStatus": "Scheduled or Started, or a later addition of Azure",
    "eventSource": "Platform or User, or a later addition of Azure",
    "resources": "names of the machines that the event concerns, at most 20",
    "resourcesLeftOut": "how many further machines it concerns",
    "notBefore": "RFC 3339: Azure does not start the event before this time",
    "durationSeconds": "announced length of the interruption",
    "revision": "names the state of the event; approvals refer to it",
    "changed": "names of the fields of the event that changed",
    "outcome": "how the event ended: completed, canceled or unknown",
    "evidence": "what the outcome is based on: observed, rebooted or none",
    "approvedByRelay": "whether IMDS has accepted a StartRequest of this relay for the event",
    "decision": "approve, hold or release",
    "principal": "who decided or asked",
    "channel": "how the decision arrived",
    "approvalId": "identifies the decision",
    "votes": "votes that count now",
    "required": "votes that the rule requires",
    "missing": "how many more votes are needed at least",
    "closes": "RFC 3339: when voting closes",
    "runbook": "URL of the rule's runbook",
    "holdId": "identifies the standing hold",
    "starts": "RFC 3339: from when the standing hold holds",
    "ends": "RFC 3339: until when the standing hold holds",
    "endedBy": "who ended the standing hold early",
    "rule": "name of the rule that matches the event",
    "dryRun": "true if no StartRequest will follow",
    "refusal": "why the relay refused a decision",
    "why": "why votes count no more: changed, expired or ended",
    "count": "how many things the line stands for",
    "sink": "name of the sink",
    "state": "the new state of the sink: on, paused or disabled",
    "mode": "the mode of approvals: on, dry-run or off",
    "reason": "why, in a sentence",
    "status": "status of the answer, of HTTP or AMQP",
    "attempts": "how often the StartRequest was sent, or how often the entry was tried",
    "agent": "the agent of a fleet that executes a StartRequest",
    "entry": "id of the delivery",
    "seconds": "how long it took",
    "method": "of the HTTP call",
    "path": "of the HTTP call, with names in place of values",
    "exitCode": "exit code of the process",
    "traceId": "of the event's trace, if `telemetry.traces` is set",
}
"""The meaning of every field. A line has those that apply."""


class Fields(TypedDict, total=False):
    """The fields of `FIELDS` with their types. A field that is None is left out of the line."""

    type: str | None
    id: str | None
    position: int | None
    eventId: str | None
    scope: str | None
    relay: str | None
    eventType: str | None
    eventStatus: str | None
    eventSource: str | None
    resources: Sequence[str] | None
    resourcesLeftOut: int | None
    notBefore: str | None
    durationSeconds: int | None
    revision: str | None
    changed: Sequence[str] | None
    outcome: str | None
    evidence: str | None
    approvedByRelay: bool | None
    decision: str | None
    principal: str | None
    channel: str | None
    approvalId: str | None
    votes: int | None
    required: int | None
    missing: int | None
    closes: str | None
    runbook: str | None
    holdId: str | None
    starts: str | None
    ends: str | None
    endedBy: str | None
    rule: str | None
    dryRun: bool | None
    refusal: str | None
    why: str | None
    count: int | None
    sink: str | None
    state: str | None
    mode: str | None
    reason: str | None
    status: int | None
    attempts: int | None
    agent: str | None
    entry: int | None
    seconds: float | None
    method: str | None
    path: str | None
    exitCode: int | None
    traceId: str | None


def log_extra(**fields: Unpack[Fields]) -> dict[str, Any]:
    """Return the ``extra`` of a logger's call: ``_log.info("…", extra=log_extra(count=2))``."""
    return {"fields": fields}
