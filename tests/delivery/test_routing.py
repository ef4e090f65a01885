"""Which sinks want an event."""

from __future__ import annotations

from typing import Any

import pytest

from relay.delivery.dispatcher import matching_sinks
from relay.sinks import SinkSettings
from tests.builders import DATA, cloudevent


def sinks(**given: dict[str, Any]) -> list[SinkSettings]:
    return [
        SinkSettings.model_validate({"kind": "test", "name": name, **section})
        for name, section in given.items()
    ]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("event.scheduled", ["all", "events", "some"]),
        ("event.ended", ["all", "events"]),
        ("approval.granted", ["all", "approvals"]),
        ("startrequest.failed", ["all"]),
        ("relay.source-lost", ["all"]),
        ("relay.ping", []),
    ],
)
def test_events_are_chosen_by_family_and_change(name: str, expected: list[str]) -> None:
    configured = sinks(
        all={},
        events={"events": ["event.*"]},
        some={"events": ["event.scheduled", "event.started"]},
        approvals={"events": ["*.granted"]},
    )
    assert list(matching_sinks(cloudevent(name), configured)) == expected


def test_match_narrows_events_and_not_what_the_relay_says_of_itself() -> None:
    configured = sinks(
        reboots={"match": {"event_type": ["reboot"]}}, freezes={"match": {"event_type": ["FREEZE"]}}
    )
    assert list(matching_sinks(cloudevent("event.scheduled"), configured)) == ["freezes"]
    assert list(matching_sinks(cloudevent("approval.granted"), configured)) == ["freezes"]
    news = cloudevent("relay.source-lost", None, {"sink": None, "reason": "x", "count": 1})
    assert list(matching_sinks(news, configured)) == ["reboots", "freezes"]


def test_for_a_sink_one_resource_is_enough_and_an_event_without_any_matches() -> None:
    configured = sinks(
        one={"match": {"resources": ["westno_1"]}}, other={"match": {"resources": ["eastno_*"]}}
    )
    assert list(matching_sinks(cloudevent(), configured)) == ["one"]
    without_any = cloudevent(data={**DATA, "resources": []})
    assert list(matching_sinks(without_any, configured)) == ["one", "other"]


def test_what_the_relay_says_of_a_sink_never_goes_to_that_sink() -> None:
    about = cloudevent("relay.sink-failing", "drain", {"sink": "drain", "reason": "x", "count": 1})
    configured = sinks(drain={}, bus={}, chat={"events": ["event.*"]})
    assert list(matching_sinks(about, configured)) == ["bus"]
