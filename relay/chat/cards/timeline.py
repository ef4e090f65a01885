"""What happened, a line for each thing: the history in a message's thread. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from relay.chat.cards.card import PrincipalRef, Text
from relay.chat.cards.rendering import ENDED, join_names
from relay.events.cloudevent import CloudEvent
from relay.events.timestamps import parse_timestamp

_WHY = {
    "changed": "the event has changed",
    "expired": "they have expired",
    "ended": "the event has ended",
}
_VERBS = {"approve": "voted to approve", "hold": "put it on hold", "release": "released the hold"}

_OF_RELAY = {
    "relay.source-lost": "Azure's metadata service does not answer this relay",
    "relay.source-recovered": "Azure's metadata service answers this relay again",
    "relay.sink-failing": "{sink} takes nothing",
    "relay.sink-recovered": "{sink} takes events again",
    "relay.sink-disabled": "{sink} is disabled until somebody resumes it",
    "relay.dead-lettered": "What {sink} did not take is given up",
    "relay.store-failing": "This relay cannot write its state file, and takes no approvals",
    "relay.clock-skewed": "The clocks of this relay and of {sink} differ",
    "relay.ping": "This is imds-relay",
}


def timeline_line(event: CloudEvent) -> Text:
    """One thing that happened, for the history of a message; also what a ``relay.*`` event is told as."""
    at, data = parse_timestamp(event.attributes.get("time")), event.data
    return (*((at, ": ") if at is not None else ()), *_said(event.name, data))


def _said(name: str, data: Mapping[str, Any]) -> Text:
    match name:
        case "event.scheduled":
            return (
                f"Azure announced a {data['eventType'] or 'maintenance'} of {join_names(data['resources']) or 'no machine that is named'}.",
            )
        case "event.updated":
            return (
                f"Azure changed {', '.join(data['changed']) or 'nothing that is named'}; votes on the former state do not count.",
            )
        case "event.started":
            return (
                "Azure began"
                + (", as this relay had approved." if data["approvedByRelay"] else "."),
            )
        case "event.ended":
            return (ENDED.get(data["outcome"], ENDED["unknown"]),)
        case "approval.recorded" | "approval.granted" | "approval.refused":
            return _decided(name, data)
        case "approval.voided":
            return (f"The votes count no more: {_WHY.get(data['why'], data['why'])}.",)
        case "startrequest.accepted":
            return ("Azure accepted the StartRequest.",)
        case "startrequest.failed":
            return (f"The StartRequest failed: {data['reason'] or 'no reason is known'}.",)
        case _:
            what = _OF_RELAY.get(name, name).replace("{sink}", data.get("sink") or "a sink")
            return (f"{what}: {data.get('reason') or 'no reason is known'}.",)


def _decided(name: str, data: Mapping[str, Any]) -> Text:
    who, why = PrincipalRef(data["principal"]), (f" (“{data['reason']}”)" if data["reason"] else "")
    if name == "approval.refused":
        return (who, f" was refused to {data['decision']}: {data['refusal']}.")
    if name == "approval.granted":
        by = (
            "it asks for no vote"
            if not data["required"]
            else f"{data['votes']} of {data['required']} votes"
        )
        return (f"Approved by rule {data['rule']}: {by}.{_dry(data)}",)
    count = (
        f", {data['votes']} of {data['required']}"
        if data["decision"] == "approve" and data["required"]
        else ""
    )
    return (who, f" {_VERBS[data['decision']]}{count}{why}.{_dry(data)}")


def _dry(data: Mapping[str, Any]) -> str:
    return " It is a dry run." if data.get("dryRun") else ""
