"""Writes what is generated: the JSON Schemas in the package, and the parts of pages in docs/ that repeat code.

`make docs` runs it; with ``--check`` it writes nothing, names what is out of date and exits with 1. Each file that is made
from code has its line in `generated`.
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

from docs.reference import MARK, api, commands, configuration, slack, with_mark
from relay.events.build import (
    EndOutcome,
    Origin,
    change_event,
    decision_event,
    event_data,
    relay_event,
)
from relay.events.catalog import CATALOG, EventData, EventDefinition, event_schema
from relay.events.cloudevent import CloudEvent
from relay.events.delta import Change, diff
from relay.events.model import Document, Event

ROOT = Path(__file__).parent.parent
SCHEMAS = ROOT / "relay" / "events" / "schemas"
EVENTS_PAGE = ROOT / "docs" / "events.md"
PAGES = {"configuration": configuration, "cli": commands, "api": api, "chat/slack": slack}
"""Pages of docs/ whose lower part repeats code."""

_ORIGIN = Origin("westno-4f7a9c21", "WestNO_0")
_BEGAN = datetime(2022, 4, 11, 22, 11, 58, 250000, tzinfo=UTC)
_EVENT = Event(
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


def generated() -> dict[Path, str]:
    """Every generated file with the text that it should hold."""
    by_hand = EVENTS_PAGE.read_text(encoding="utf-8").partition(MARK)[0]
    return {
        **{
            SCHEMAS / f"{kind.name}.v1.json": _pretty(event_schema(kind)) + "\n" for kind in CATALOG
        },
        EVENTS_PAGE: f"{by_hand}{MARK}\n{catalogue()}",
        **{
            ROOT / "docs" / f"{name}.md": with_mark(ROOT / "docs" / f"{name}.md", make())
            for name, make in PAGES.items()
        },
    }


def stale() -> list[Path]:
    """What is missing, out of date, or a schema of no event."""
    wanted = generated()
    wrong = [
        path
        for path, text in wanted.items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    ]
    return wrong + [path for path in sorted(SCHEMAS.glob("*.json")) if path not in wanted]


def examples() -> list[CloudEvent]:
    """One event of each type, in the order of the catalogue, made by the code that makes them all."""
    made = {said.name: said for said in (*_of_the_event(), *_of_decisions(), *_of_the_relay())}
    return [made[kind.name] for kind in CATALOG]


def catalogue() -> str:
    """The part of docs/events.md that lists each type with its data and an example."""
    by_name = {said.name: said for said in examples()}
    return "\n".join(_section(kind, by_name[kind.name]) for kind in CATALOG)


def main(arguments: list[str]) -> int:
    """Write, or with ``--check`` only name, what is out of date."""
    wrong = stale()
    if "--check" in arguments:
        for path in wrong:
            print(f"out of date, run make docs: {path.relative_to(ROOT)}")
        return 1 if wrong else 0
    wanted = generated()
    SCHEMAS.mkdir(exist_ok=True)
    for path in wrong:
        if path in wanted:
            path.write_text(wanted[path], encoding="utf-8")
        else:
            path.unlink()
        print(f"written: {path.relative_to(ROOT)}")
    return 0


def _of_the_event() -> Iterator[CloudEvent]:
    later = _with(_EVENT, notBefore="2022-04-11T22:41:58Z")
    under_way = _with(later, eventStatus="Started", notBefore=None)
    states: list[tuple[Event, ...]] = [(), (_EVENT,), (later,), (under_way,), ()]
    for incarnation, (before, after) in enumerate(pairwise(states), start=2):
        (change,) = diff(before, Document(incarnation, after))
        yield _told(change, incarnation)


def _told(change: Change, incarnation: int) -> CloudEvent:
    ended = change.kind == "ended"
    return change_event(
        change,
        _ORIGIN,
        _BEGAN + timedelta(minutes=5 * (incarnation - 2)),
        data=event_data(change.event, incarnation - ended),
        previous_count=0,
        approved_by_relay=change.kind in ("started", "ended"),
        outcome=EndOutcome("completed", "observed") if ended else None,
    )


def _of_decisions() -> Iterator[CloudEvent]:
    vote = {
        "approvalId": "5f0c6f2a9f5d4c27b2a0d0f4a8d1c3e7",
        "decision": "approve",
        "principal": "client:db-drain",
        "channel": "http",
        "reason": "drained",
        "votes": 1,
        "required": 2,
        "rule": "databases",
    }
    granted = {
        **vote,
        "principal": "client:alice",
        "channel": "callback",
        "reason": None,
        "votes": 2,
    }
    refused = {
        **vote,
        "principal": "client:intern",
        "reason": None,
        "refusal": "the rule databases takes no vote of client:intern",
    }
    accepted: dict[str, Any] = {"status": 200, "attempts": 1, "reason": None}
    failed = {
        "status": 400,
        "attempts": 1,
        "reason": "IMDS refused the StartRequest as malformed (400)",
    }
    yield _decided(1, "approval.recorded", vote, cause="7a0e1c1e-3d8f-4f0a-9a57-1d5f0c8f3b61")
    yield _decided(2, "approval.granted", granted)
    yield _decided(3, "approval.refused", refused)
    yield _decided(4, "approval.voided", {"why": "changed"})
    yield _decided(5, "startrequest.accepted", accepted)
    yield _decided(6, "startrequest.failed", failed)


def _decided(
    position: int, name: str, added: Mapping[str, Any], cause: str | None = None
) -> CloudEvent:
    at = _BEGAN + timedelta(minutes=1, seconds=position)
    return decision_event(
        name,
        _ORIGIN,
        at,
        event=event_data(_EVENT, 2),
        added=added,
        cause=cause,
        head=_head(position),
    )


def _of_the_relay() -> Iterator[CloudEvent]:
    told: list[tuple[str, str | None, str, int]] = [
        ("source-lost", None, "no usable answer for 90 s: expected 200, got 410 Gone", 1),
        ("source-recovered", None, "the metadata service answers again", 1),
        ("sink-failing", "drain", "expected 2xx, got 503", 5),
        ("sink-recovered", "drain", "delivered again after 12 failures", 12),
        ("sink-disabled", "drain", "the receiver answered 410: it wants no more", 1),
        ("dead-lettered", "drain", "given up after 24h: expected 2xx, got 503", 3),
        ("store-failing", None, "the state file cannot be written: disk full", 1),
        ("clock-skewed", "drain", "the receiver's clock is 94 s ahead of ours", 1),
        ("ping", "drain", "asked for by local:root", 1),
    ]
    for position, (name, sink, reason, count) in enumerate(told, start=7):
        at = _BEGAN + timedelta(hours=1, minutes=position)
        yield relay_event(
            f"relay.{name}",
            _ORIGIN,
            at,
            sink=sink,
            reason=reason,
            count=count,
            head=_head(position),
        )


def _with(event: Event, **changes: Any) -> Event:
    return Event.from_fields(event.to_fields() | changes)


def _head(position: int) -> str:
    return f"{position}:{'3b' * 32}"


def _section(kind: EventDefinition, example: CloudEvent) -> str:
    described = TypeAdapter(kind.data).json_schema()
    known = TypeAdapter(EventData).json_schema()["properties"] if kind.data is not EventData else {}
    fields = {name: field for name, field in described["properties"].items() if name not in known}
    introduced = (
        "`data` is that of the event, and:"
        if known and "eventId" in described["properties"]
        else "`data`:"
    )
    rows = [
        f"| `{name}` | {_type(field)} | {field['description']} |" for name, field in fields.items()
    ]
    return "\n".join(
        [
            f"## {kind.name}",
            "",
            f"`{kind.type}`: {kind.when}. {described['description']}",
            "",
            introduced,
            "",
            "| field | type | |",
            "| --- | --- | --- |",
            *rows,
            "",
            "```json",
            _pretty(orjson.loads(example.body)),
            "```",
            "",
        ]
    )


def _type(field: Mapping[str, Any]) -> str:
    if "anyOf" in field:
        return " or ".join(_type(one) for one in field["anyOf"])
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    if field["type"] == "array":
        return f"list of {_type(field['items'])}"
    return str(field["type"])


def _pretty(value: Any) -> str:
    return orjson.dumps(value, option=orjson.OPT_INDENT_2).decode()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
