"""The fields of log lines: what a line says, for programs and for searches.

Whoever logs passes ``extra=log_extra(…)``. The formatters of `relay.telemetry.log` read it. A field
has the same name and meaning in every line, see docs/log.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, TypedDict, get_type_hints

from typing_extensions import Unpack


class LogFields(TypedDict, total=False):
    """Every field with its type and its meaning. One that is None is left out of the line."""

    type: Annotated[str | None, "what happened: `<family>.<change>` of the CloudEvent"]
    id: Annotated[str | None, "id of the CloudEvent"]
    position: Annotated[int | None, "its position in the journal"]
    eventId: Annotated[
        str | None, "Azure's identifier of the scheduled event, in its original case"
    ]
    scope: Annotated[str | None, "the group of VMs that read the same document"]
    relay: Annotated[str | None, "the relay that says it"]
    eventType: Annotated[
        str | None, "Freeze, Reboot, Redeploy, Preempt, Terminate, or a later addition of Azure"
    ]
    eventStatus: Annotated[str | None, "Scheduled or Started, or a later addition of Azure"]
    eventSource: Annotated[str | None, "Platform or User, or a later addition of Azure"]
    resources: Annotated[
        Sequence[str] | None, "names of the machines that the event concerns, at most 20"
    ]
    resourcesLeftOut: Annotated[int | None, "how many further machines it concerns"]
    notBefore: Annotated[str | None, "RFC 3339: Azure does not start the event before this time"]
    durationSeconds: Annotated[int | None, "announced length of the interruption"]
    revision: Annotated[str | None, "names the state of the event; approvals refer to it"]
    changed: Annotated[Sequence[str] | None, "names of the fields of the event that changed"]
    outcome: Annotated[str | None, "how the event ended: completed, canceled or unknown"]
    evidence: Annotated[str | None, "what the outcome is based on: observed, rebooted or none"]
    approvedByRelay: Annotated[
        bool | None, "whether IMDS has accepted a StartRequest of this relay for the event"
    ]
    decision: Annotated[str | None, "approve, hold or release"]
    principal: Annotated[str | None, "who decided or asked"]
    channel: Annotated[str | None, "how the decision arrived"]
    approvalId: Annotated[str | None, "identifies the decision"]
    votes: Annotated[int | None, "votes that count now"]
    required: Annotated[int | None, "votes that the rule requires"]
    missing: Annotated[int | None, "how many more votes are needed at least"]
    closes: Annotated[str | None, "RFC 3339: when voting closes"]
    runbook: Annotated[str | None, "URL of the rule's runbook"]
    holdId: Annotated[str | None, "identifies the standing hold"]
    starts: Annotated[str | None, "RFC 3339: from when the standing hold holds"]
    ends: Annotated[str | None, "RFC 3339: until when the standing hold holds"]
    endedBy: Annotated[str | None, "who ended the standing hold early"]
    rule: Annotated[str | None, "name of the rule that matches the event"]
    dryRun: Annotated[bool | None, "true if no StartRequest will follow"]
    refusal: Annotated[str | None, "why the relay refused a decision"]
    why: Annotated[str | None, "why votes count no more: changed, expired or ended"]
    count: Annotated[int | None, "how many things the line stands for"]
    sink: Annotated[str | None, "name of the sink"]
    state: Annotated[str | None, "the new state of the sink: on, paused or disabled"]
    mode: Annotated[str | None, "the mode of approvals: on, dry-run or off"]
    reason: Annotated[str | None, "why, in a sentence"]
    status: Annotated[int | None, "status of the answer, of HTTP or AMQP"]
    attempts: Annotated[
        int | None, "how often the StartRequest was sent, or how often the entry was tried"
    ]
    agent: Annotated[str | None, "the agent of a fleet that executes a StartRequest"]
    entry: Annotated[int | None, "id of the delivery"]
    seconds: Annotated[float | None, "how long it took"]
    method: Annotated[str | None, "of the HTTP call"]
    path: Annotated[str | None, "of the HTTP call, with names in place of values"]
    exitCode: Annotated[int | None, "exit code of the process"]


def field_meanings() -> dict[str, str]:
    """Return the meaning of every field by its name, for the documentation."""
    hints = get_type_hints(LogFields, include_extras=True)
    return {name: hint.__metadata__[0] for name, hint in hints.items()}


def log_extra(**fields: Unpack[LogFields]) -> dict[str, Any]:
    """Return the ``extra`` of a logger's call: ``_log.info("…", extra=log_extra(count=2))``."""
    return {"fields": fields}
