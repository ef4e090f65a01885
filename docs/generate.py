"""Writes the generated files: JSON Schemas, configurations, and parts of pages in docs/.

`make docs` runs it. With ``--check`` it writes nothing, names the files that are out of date, and
exits with 1. `generated_files` lists every generated file.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import orjson
from pydantic import TypeAdapter

from chaos import report as proof
from docs.reference import api, commands, log, pretty, slack, with_generated_part
from relay.approvals.request import HOLD_NOTICE
from relay.cli.init import initial_configuration
from relay.config import AGENT_EXAMPLE
from relay.events.build import (
    CATALOG,
    EndOutcome,
    EventDefinition,
    Origin,
    approval_or_startrequest_event,
    change_event,
    common_event_data,
    relay_event,
    standing_hold_event,
)
from relay.events.cloudevent import CloudEvent
from relay.events.data_types import EventData
from relay.events.model import Change, Document, ScheduledEvent, diff_events_with_document

ROOT = Path(__file__).parent.parent
EVENTS_PAGE = ROOT / "docs" / "events.md"
CONFIGURATION = ROOT / "config" / "relay.yaml"
"""The output of `imds-relay init`."""
AGENT_CONFIGURATION = ROOT / "config" / "agent.yaml"
"""The output of `imds-relay init --agent`."""


PAGES = {
    ROOT / "docs" / "cli.md": commands,
    ROOT / "docs" / "api.md": api,
    ROOT / "docs" / "log.md": log,
    ROOT / "docs" / "chat" / "slack.md": slack,
    proof.PAGE: proof.page,
}
"""Pages with a generated part, and the function that generates it; see also `EVENTS_PAGE`."""

_ORIGIN = Origin("westno-4f7a9c21", "WestNO_0")
_FIRST_TIME = datetime(2022, 4, 11, 22, 11, 58, 250000, tzinfo=UTC)
_EVENT = ScheduledEvent(
    event_id="C7061BAC-AFDC-4513-B24B-AA5F13A16123",
    event_type="Reboot",
    event_status="Scheduled",
    resource_type="VirtualMachine",
    resources=("WestNO_0", "WestNO_1"),
    not_before="2022-04-11T22:26:58Z",
    description="Host server is undergoing maintenance.",
    event_source="Platform",
    duration=None,
)


def generated_files() -> dict[Path, str]:
    """Return every generated file with the text that it should hold."""
    pages = {path: with_generated_part(path, generate()) for path, generate in PAGES.items()}
    return {
        **pages,
        EVENTS_PAGE: with_generated_part(EVENTS_PAGE, catalog()),
        CONFIGURATION: initial_configuration(),
        AGENT_CONFIGURATION: AGENT_EXAMPLE.read_text(encoding="utf-8"),
    }


def stale() -> list[Path]:
    """Return the files that are missing or out of date."""
    return [
        path
        for path, text in generated_files().items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    ]


def examples() -> list[CloudEvent]:
    """Return one event of each type in the order of the catalog, made by the relay's own code."""
    events = (
        *_event_examples(),
        *_decision_examples(),
        *_standing_hold_examples(),
        *_relay_examples(),
    )
    events_by_name = {event.name: event for event in events}
    return [events_by_name[definition.name] for definition in CATALOG]


def catalog() -> str:
    """Return the part of docs/events.md that lists each type with its data and an example.

    Types whose data has no field of its own share a table at the end.
    """
    first: dict[str, CloudEvent] = {}
    told: dict[str, dict[str, str]] = {}
    sections: list[str] = []
    alike: list[str] = []
    for definition, example in zip(CATALOG, examples(), strict=True):
        family = definition.name.partition(".")[0]
        whole = orjson.loads(example.body)
        known = first.get("event" if "eventId" in example.data else family)
        shown = whole if not first else _difference(example, known)
        section, has_new_fields = _section(definition, shown, told)
        if family in first and not has_new_fields:
            difference = orjson.dumps(_difference(example, first[family])).decode()
            alike.append(
                f"| `{definition.name}` | {definition.when} | `{first[family].name}` | "
                f"`{difference}` |"
            )
        else:
            sections.append(section)
        first.setdefault(family, example)
    sections += [
        "## Other types",
        "",
        "| type | when | its data has fields of | example of what differs |",
        "| --- | --- | --- | --- |",
        *alike,
        "",
    ]
    return "\n".join(sections)


def _difference(example: CloudEvent, known: CloudEvent | None) -> dict[str, Any]:
    """Return the data of an example that another one has not."""
    others = known.data if known is not None else {}
    return dict(item for item in example.data.items() if item not in others.items())


def main(arguments: list[str]) -> int:
    """Write the files that are out of date; with ``--check`` only name them."""
    outdated = stale()
    if "--check" in arguments:
        for path in outdated:
            print(f"out of date, run make docs: {path.relative_to(ROOT)}")
        return 1 if outdated else 0
    files = generated_files()
    for path in outdated:
        path.write_text(files[path], encoding="utf-8")
        print(f"written: {path.relative_to(ROOT)}")
    return 0


def _event_examples() -> Iterator[CloudEvent]:
    rescheduled = _changed(_EVENT, notBefore="2022-04-11T22:41:58Z")
    started = _changed(rescheduled, eventStatus="Started", notBefore=None)
    states: list[tuple[ScheduledEvent, ...]] = [(), (_EVENT,), (rescheduled,), (started,), ()]
    for incarnation, (before, after) in enumerate(pairwise(states), start=2):
        (change,) = diff_events_with_document(before, Document(incarnation, after))
        yield _change_example(change, incarnation)


def _change_example(change: Change, incarnation: int) -> CloudEvent:
    ended = change.kind == "ended"
    return change_event(
        change,
        _ORIGIN,
        _FIRST_TIME + timedelta(minutes=5 * (incarnation - 2)),
        data=common_event_data(change.event, incarnation - ended),
        previous_count=0,
        approved_by_relay=change.kind in ("started", "ended"),
        outcome=EndOutcome("completed", "observed") if ended else None,
    )


def _decision_examples() -> Iterator[CloudEvent]:
    vote = {
        "approvalId": "5f0c6f2a9f5d4c27b2a0d0f4a8d1c3e7",
        "decision": "approve",
        "principal": "client:db-drain",
        "channel": "http",
        "reason": "drained",
        "ticket": "CHG-7",
        "votes": 1,
        "required": 2,
        "rule": "databases",
    }
    granted = {
        **vote,
        "principal": "client:alice",
        "channel": "callback",
        "reason": None,
        "ticket": None,
        "votes": 2,
    }
    refused = {
        **vote,
        "principal": "client:intern",
        "reason": None,
        "ticket": None,
        "refusal": "the rule databases takes no vote of client:intern",
    }
    accepted: dict[str, Any] = {
        "approvalId": vote["approvalId"],
        "status": 200,
        "attempts": 1,
        "reason": None,
    }
    failed = {
        "approvalId": vote["approvalId"],
        "status": 400,
        "attempts": 1,
        "reason": "IMDS refused the StartRequest as malformed (400)",
    }
    yield _decision_example(
        1, "approval.recorded", vote, cause="7a0e1c1e-3d8f-4f0a-9a57-1d5f0c8f3b61"
    )
    yield _decision_example(2, "approval.granted", granted)
    yield _decision_example(3, "approval.refused", refused)
    yield _decision_example(4, "approval.voided", {"why": "changed"})
    yield _decision_example(5, "startrequest.accepted", accepted)
    yield _decision_example(6, "startrequest.failed", failed)
    reminder = {
        "votes": 1,
        "required": 2,
        "missing": 1,
        "rule": "databases",
        "mayVote": ["client:alice", "client:bob"],
        "uncoveredResources": [],
        "closes": "2022-04-11T22:26:58Z",
        "runbook": "https://wiki.example.com/databases#maintenance",
    }
    yield _decision_example(20, "approval.reminder", reminder)


def _decision_example(
    position: int, name: str, added: Mapping[str, Any], cause: str | None = None
) -> CloudEvent:
    at = _FIRST_TIME + timedelta(minutes=1, seconds=position)
    return approval_or_startrequest_event(
        name,
        _ORIGIN,
        at,
        event=common_event_data(_EVENT, 2),
        added=added,
        cause=cause,
        head=_head(position),
    )


def _standing_hold_examples() -> Iterator[CloudEvent]:
    hold = {
        "holdId": "0b1e6e4f3a5d4c27b2a0d0f4a8d1c3e7",
        "match": {"event_type": ["Reboot", "Redeploy"], "resources": ["db-*"]},
        "starts": "2022-04-15T16:00:00Z",
        "ends": "2022-04-18T06:00:00Z",
        "principal": "client:alice",
        "channel": "http",
        "reason": "year-end closing",
        "created": "2022-04-11T22:13:19Z",
        "notice": HOLD_NOTICE,
    }
    ended = {"endedBy": "client:alice", "endReason": "finished early"}
    examples = [
        (21, "created", _FIRST_TIME + timedelta(seconds=81), hold),
        (22, "ended", _FIRST_TIME + timedelta(days=5), hold | ended),
        (23, "expired", _FIRST_TIME + timedelta(days=7), hold),
    ]
    for position, change, at, data in examples:
        yield standing_hold_event(
            f"standing-hold.{change}", _ORIGIN, at, data=data, head=_head(position)
        )


def _relay_examples() -> Iterator[CloudEvent]:
    examples: list[tuple[str, str | None, str, int]] = [
        ("source-lost", None, "no usable answer for 90 s: expected 200, got 410 Gone", 1),
        ("source-recovered", None, "the metadata service answers again", 1),
        ("silent", None, "no agent of scope vmss-a-1f0c33ab has been heard of for 150 s", 2),
        ("sink-failing", "drain", "expected 2xx, got 503", 5),
        ("sink-recovered", "drain", "delivered again after 12 failures", 12),
        ("sink-disabled", "drain", "the receiver answered 410: it wants no more", 1),
        ("dead-lettered", "drain", "given up after 24h: expected 2xx, got 503", 3),
        ("store-failing", None, "the state file cannot be written: disk full", 1),
        ("clock-skewed", "drain", "the receiver's clock is 94 s ahead of ours", 1),
        ("ping", "drain", "asked for by local:root", 1),
    ]
    for position, (name, sink, reason, count) in enumerate(examples, start=7):
        at = _FIRST_TIME + timedelta(hours=1, minutes=position)
        yield relay_event(
            f"relay.{name}",
            _ORIGIN,
            at,
            sink=sink,
            reason=reason,
            count=count,
            head=_head(position),
        )


def _changed(event: ScheduledEvent, **changes: Any) -> ScheduledEvent:
    return ScheduledEvent.from_cloudevent_data(event.to_cloudevent_data() | changes)


def _head(position: int) -> str:
    return f"{position}:{'3b' * 32}"


def _section(
    definition: EventDefinition, example: Mapping[str, Any], told: dict[str, dict[str, str]]
) -> tuple[str, bool]:
    """Return the section of a type, and whether it has fields that no earlier type has."""
    schema = TypeAdapter(definition.data).json_schema()
    definitions = schema.get("$defs", {})
    of_event = TypeAdapter(EventData).json_schema()["properties"]
    is_about_event = definition.data is not EventData and "eventId" in schema["properties"]
    parts = ["that of the [event](#eventscheduled)"] if is_about_event else []
    new = {
        name: f"- `{name}` ({_type(field, definitions)}): {field['description']}"
        for name, field in schema["properties"].items()
        if not (is_about_event and name in of_event)
    }
    for earlier, fields in told.items():
        known = [f"`{name}`" for name, line in new.items() if fields.get(name) == line]
        new = {name: line for name, line in new.items() if fields.get(name) != line}
        if known:
            listed = "all" if len(known) == len(fields) else ", ".join(known)
            parts.append(f"{listed} of [`{earlier}`](#{earlier.replace('.', '')})")
    told[definition.name] = new
    introduction = f"`data`{' is ' if parts else ''}{', and '.join(parts)}"
    introduction += (", and" if parts else " has") + ":" if new else "."
    lines = [
        f"## {definition.name}",
        "",
        f"`{definition.type}`: {definition.when}. {schema['description']}",
        introduction,
        "",
        *new.values(),
        *([""] if new else []),
        "```json",
        pretty(example),
        "```",
        "",
    ]
    return "\n".join(lines), bool(new)


def _type(field: Mapping[str, Any], definitions: Mapping[str, Any]) -> str:
    if "$ref" in field:
        properties = definitions[field["$ref"].rpartition("/")[2]]["properties"]
        return f"object with {', '.join(f'`{name}`' for name in properties)}"
    if "anyOf" in field:
        return " or ".join(_type(inner, definitions) for inner in field["anyOf"])
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    if field["type"] == "array":
        items = _type(field["items"], definitions)
        return f"list of {items.replace('object with', 'objects with')}"
    return str(field["type"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
