"""The one matching language: a table, and laws."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import ValidationError

from relay.approvals.standing_holds import standing_hold_to_json_object
from relay.events.match import Match, matches, matches_any_pattern
from tests.approvals.builders import build_standing_hold

TYPES, SOURCES = ["Freeze", "Reboot", "Redeploy"], ["Platform", "User"]
NAMES = ["db-1", "DB-2", "web-1"]
DATA = st.fixed_dictionaries(
    {
        "eventType": st.sampled_from([None, *TYPES]),
        "eventSource": st.sampled_from([None, *SOURCES]),
        "durationSeconds": st.none() | st.integers(0, 20),
        "resources": st.none() | st.lists(st.sampled_from(NAMES), unique=True),
    }
)
CONDITIONS = st.fixed_dictionaries(
    {},
    optional={
        "event_type": st.lists(st.sampled_from(TYPES), min_size=1),
        "event_source": st.lists(st.sampled_from(SOURCES), min_size=1),
        "duration": st.builds(
            lambda low, more: {"min": f"{low}s", "max": f"{low + more}s"},
            st.integers(0, 20),
            st.integers(0, 20),
        ),
        "resources": st.lists(st.sampled_from(["db-*", "web-?", "*", "db-1"]), min_size=1),
        "scope": st.lists(st.sampled_from(["prod-*", "test"]), min_size=1),
    },
)
SCOPES = st.sampled_from(["prod-a", "test"])
ANY_TEXTS = st.none() | st.lists(st.text(max_size=5), max_size=2)
ANY_BOUND = st.one_of(
    st.none(),
    st.integers(),
    st.floats(),
    st.from_regex(r"\A[0-9]{1,310}(\.[0-9]{1,20})?(ms|s|m|h|d)\Z"),
)
BODIES = st.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys(("event_type", "event_source", "resources", "scope"), ANY_TEXTS),
        "duration": st.none()
        | st.fixed_dictionaries({}, optional={"min": ANY_BOUND, "max": ANY_BOUND}),
    },
)
FREEZE: dict[str, Any] = {
    "eventType": "Freeze",
    "eventSource": "Platform",
    "durationSeconds": 5,
    "resources": ["db-1", "DB-2"],
}


def match_of(conditions: dict[str, Any]) -> Match:
    return Match.model_validate(conditions)


@pytest.mark.parametrize(
    ("conditions", "changes", "every", "one"),
    [
        # No condition.
        ({}, {}, True, True),
        (
            {},
            {"eventType": None, "eventSource": None, "durationSeconds": None, "resources": []},
            True,
            True,
        ),
        # Type and source: any of them, without case; what is not known is none of them.
        ({"event_type": ["Freeze"]}, {}, True, True),
        ({"event_type": ["freeze"]}, {}, True, True),
        ({"event_type": ["Reboot", "FREEZE"]}, {}, True, True),
        ({"event_type": ["Reboot"]}, {}, False, False),
        ({"event_type": ["Free*"]}, {}, False, False),
        ({"event_type": ["Freeze"]}, {"eventType": None}, False, False),
        ({"event_source": ["user"]}, {"eventSource": "User"}, True, True),
        ({"event_source": ["User"]}, {}, False, False),
        ({"event_source": ["User"]}, {"eventSource": None}, False, False),
        # Duration: both ends included; unknown is in no range.
        ({"duration": {"min": "0s", "max": "8s"}}, {"durationSeconds": 0}, True, True),
        ({"duration": {"min": "0s", "max": "8s"}}, {"durationSeconds": 8}, True, True),
        ({"duration": {"min": "0s", "max": "8s"}}, {"durationSeconds": 9}, False, False),
        ({"duration": {"max": "8s"}}, {}, True, True),
        ({"duration": {"min": "6s"}}, {}, False, False),
        ({"duration": {"min": "5s"}}, {}, True, True),
        ({"duration": {}}, {"durationSeconds": None}, False, False),
        ({"duration": {"min": "0s"}}, {"durationSeconds": None}, False, False),
        # Resources: all of them for rules and clients, one of them for sinks.
        ({"resources": ["db-*"]}, {}, True, True),
        ({"resources": ["DB-*"]}, {}, True, True),
        ({"resources": ["db-1"]}, {}, False, True),
        ({"resources": ["db-1", "db-2"]}, {}, True, True),
        ({"resources": ["db-?"]}, {"resources": ["db-1", "db-10"]}, False, True),
        ({"resources": ["web-*"]}, {}, False, False),
        ({"resources": ["db-*"]}, {"resources": ["db-1", "web-1"]}, False, True),
        # No resources: no rule's condition holds, a sink is told.
        ({"resources": ["*"]}, {"resources": []}, False, True),
        ({"resources": ["*"]}, {"resources": None}, False, True),
        ({"resources": ["db-*"]}, {"resources": []}, False, True),
        # Scope.
        ({"scope": ["prod-a"]}, {}, True, True),
        ({"scope": ["PROD-*"]}, {}, True, True),
        ({"scope": ["test"]}, {}, False, False),
        # All conditions must hold.
        ({"event_type": ["Freeze"], "event_source": ["User"]}, {}, False, False),
        (
            {
                "event_type": ["Freeze"],
                "duration": {"max": "8s"},
                "resources": ["db-*"],
                "scope": ["prod-*"],
            },
            {},
            True,
            True,
        ),
    ],
)
def test_conditions(
    conditions: dict[str, Any], changes: dict[str, Any], every: bool, one: bool
) -> None:
    match, data = match_of(conditions), FREEZE | changes
    assert matches(match, data, "prod-a") is every
    assert matches(match, data, "prod-a", every_resource=False) is one


@example({"duration": {"min": -5.0}})
@given(BODIES)
def test_what_a_body_says_can_be_read_again_from_the_journal(body: dict[str, Any]) -> None:
    try:
        accepted = match_of(body)
    except ValidationError:
        return
    hold = standing_hold_to_json_object(build_standing_hold(conditions=accepted))
    again = match_of(orjson.loads(orjson.dumps(hold["match"])))
    no_duration = {"duration": None}
    assert again.model_copy(update=no_duration) == accepted.model_copy(update=no_duration)
    assert (again.duration is None) is (accepted.duration is None)
    if again.duration is not None and accepted.duration is not None:
        for bound, said in zip(again.duration, accepted.duration, strict=True):
            assert bound[1] == pytest.approx(said[1], rel=1e-9, abs=0.001)  # written in ms


@given(CONDITIONS, CONDITIONS, DATA, SCOPES, st.booleans())
def test_one_more_condition_never_lets_more_through(
    some: dict[str, Any], more: dict[str, Any], data: dict[str, Any], scope: str, every: bool
) -> None:
    both = more | some
    if matches(match_of(both), data, scope, every_resource=every):
        assert matches(match_of(some), data, scope, every_resource=every)


@given(CONDITIONS, DATA, SCOPES, st.booleans())
def test_case_says_nothing(
    conditions: dict[str, Any], data: dict[str, Any], scope: str, every: bool
) -> None:
    def shouted(value: Any) -> Any:
        if isinstance(value, list):
            return [one.upper() for one in value]
        return value.upper() if isinstance(value, str) else value

    loud_data = {name: shouted(value) for name, value in data.items()}
    loud = {name: shouted(value) for name, value in conditions.items()}
    answers = {
        matches(match_of(either), one, named, every_resource=every)
        for either in (conditions, loud)
        for one in (data, loud_data)
        for named in (scope, scope.upper())
    }
    assert len(answers) == 1


def test_patterns() -> None:
    assert matches_any_pattern(["db-[12]"], "DB-2")
    assert not matches_any_pattern(["db-[12]"], "db-3")
    assert not matches_any_pattern(["db"], "db-1")
    assert not matches_any_pattern([], "db-1")
    assert matches_any_pattern(["*"], "")


@pytest.mark.parametrize(
    "wrong",
    [
        {"event_type": []},
        {"resources": []},
        {"event_typ": ["Freeze"]},
        {"event_type": "Freeze"},
        {"duration": {"max": 8}},
    ],
)
def test_a_condition_that_cannot_be_meant_is_refused(wrong: dict[str, Any]) -> None:
    """An empty list would match nothing, or everything: nobody knows which was meant."""
    with pytest.raises(ValidationError):
        match_of(wrong)
