"""The words about one event and about a burst, and the buttons that make sense."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.approvals.authorize import HOLD_NOTICE, authorize
from relay.approvals.request import DecisionKind
from relay.approvals.status import ApprovalStatus
from relay.chat.cards.card import Card, PrincipalRef, Text
from relay.chat.cards.grouped_card import MAX_LISTED_EVENTS, grouped_card
from relay.chat.cards.rendering import (
    MAX_NAMES,
    available_decisions,
    event_card,
    impact_text,
    join_names,
    refresh_time,
)
from relay.chat.cards.timeline import timeline_line
from relay.events.catalog import CATALOG, EventDefinition
from relay.events.cloudevent import CloudEvent
from tests.approvals.builders import (
    Book,
    approval,
    caller,
    decided,
    event,
    granted,
    occurrence,
    standing,
)
from tests.approvals.manual_clock import NOON

CHOICES: tuple[DecisionKind, ...] = ("approve", "hold", "release")
DUE = NOON + timedelta(seconds=900)


def flat(text: Text) -> str:
    """A text as it reads, with moments as hours and people as they are."""
    return "".join(
        f"{part:%H:%M}"
        if isinstance(part, datetime)
        else part.principal
        if isinstance(part, PrincipalRef)
        else part
        for part in text
    )


def said(card: Card) -> str:
    """Everything that a card says."""
    facts = [f"{label}: {flat(text)}" for label, text in card.facts]
    lines = [flat(line.text) for line in card.lines]
    return "\n".join(
        [
            card.title,
            flat(card.summary),
            *facts,
            *map(flat, card.notes),
            *lines,
            *(one.label for one in card.buttons),
            card.footer,
        ]
    )


def card(one: ApprovalStatus, *, link: str | None = "https://relay.example.com/approve#t") -> Card:
    """The message about one event, with links."""
    return event_card(one, "prod", link=lambda _, __: link, code="123456")


def labels(found: Card) -> list[str]:
    return [one.label for one in found.buttons]


def test_a_message_says_what_happens_to_which_machines_when_and_by_whom() -> None:
    """Issue 6, item 2: the same words everywhere."""
    text = said(
        card(
            standing(event(resources=("db-1", "db-2"), duration=30, description="Host maintenance"))
        )
    )
    assert text.splitlines() == [
        "Reboot of db-1, db-2",
        "Azure begins at 12:15 or soon after, whether or not anybody answers; earlier only when it is approved.",
        "Machines: db-1, db-2",
        "What happens: Each machine is rebooted: what is in memory is lost; it takes about 30 s.",
        "Who started it: Azure itself",
        "Azure says: Host maintenance",
        "Rule: databases: 2 votes from group:oncall, client:drain",
        "Votes: 0 of 2; 2 missing, from client:alice, client:bob, client:drain, until 12:14",
        "Azure proceeds at NotBefore regardless.",
        "Approve",
        "Hold",
        "E-1 · prod",
    ]


def test_a_vote_is_shown_with_who_gave_it_and_who_is_missing() -> None:
    assert (
        "Votes: 1 of 2: client:alice; 1 missing, from client:bob, client:drain, until 12:14"
        in said(card(standing(None, decided())))
    )


def test_a_held_event_says_what_a_hold_means_and_offers_to_release_it() -> None:
    """Every text about a hold says that Azure proceeds."""
    found = card(standing(None, decided("hold", expires=3600)))
    assert labels(found) == ["Approve", "Release the hold"]
    assert found.tone == "held"
    assert HOLD_NOTICE.lower() in said(found).lower()
    assert "Held by: client:alice until 13:00" in said(found)
    assert all(
        HOLD_NOTICE in flat(one.question)
        for one in card(standing()).buttons
        if one.decision == "hold"
    )


@pytest.mark.parametrize(
    ("one", "tone", "words"),
    [
        (standing(grants=[granted()]), "approved", "the StartRequest is about to be sent"),
        (standing(grants=[granted("sent")]), "approved", "the StartRequest was sent"),
        (standing(grants=[granted("accepted")]), "approved", "Azure has accepted the StartRequest"),
        (standing(event(event_status="Started", due=None)), "running", "Azure has begun."),
        (standing(live=False), "over", "whether it happened is not known"),
        (
            replace(standing(), occurrence=occurrence(live=False, outcome="completed")),
            "over",
            "Azure has completed it",
        ),
        (
            replace(standing(), occurrence=occurrence(live=False, outcome="canceled")),
            "over",
            "it does not happen",
        ),
        (standing(mode="off"), "waiting", "Approvals are off"),
        (standing(mode="dry-run"), "waiting", "no StartRequest is sent"),
        (standing(now=901), "waiting", "NotBefore was 12:15: Azure can begin at any moment."),
        (
            standing(event(event_type="Freeze")),
            "waiting",
            "no rule allows this relay to approve it",
        ),
        (standing(event(event_source="User")), "waiting", "users: approved automatically"),
    ],
)
def test_each_state_is_said_in_words(one: ApprovalStatus, tone: str, words: str) -> None:
    found = card(one)
    assert found.tone == tone
    assert words in said(found)


@pytest.mark.parametrize(
    "one",
    [
        standing(live=False),
        standing(event(event_status="Started", due=None)),
        standing(grants=[granted("sent")]),
        standing(grants=[granted("accepted")]),
        standing(mode="off"),
        standing(now=901),
    ],
)
def test_buttons_vanish_when_they_no_longer_can(one: ApprovalStatus) -> None:
    found = card(one)
    assert found.buttons == ()
    assert found.code is None


def test_voting_that_has_closed_leaves_the_hold() -> None:
    assert labels(card(standing(now=841))) == ["Hold"]


def test_a_message_that_leads_nowhere_says_where_to_decide() -> None:
    found = event_card(standing(), "prod", link=None, code="123456")
    assert found.buttons == ()
    assert found.code is None
    assert "imds-relay approve|hold E-1" in said(found)


def test_buttons_that_are_answered_in_the_chat_show_no_code() -> None:
    assert card(standing(), link=None).code is None
    assert card(standing()).code == "123456"


def test_many_machines_are_counted() -> None:
    names = [f"vm-{number}" for number in range(100)]
    assert join_names(names) == f"{', '.join(names[:MAX_NAMES])} and 90 more"
    assert len(said(card(standing(event(resources=tuple(names)))))) < 1500


@pytest.mark.parametrize(
    ("kind", "seconds", "text"),
    [
        (
            "Freeze",
            5,
            "The machine is paused for about 5 s: memory and open files stay, connections can drop.",
        ),
        (
            "Freeze",
            None,
            "The machine is paused for a while: memory and open files stay, connections can drop.",
        ),
        (
            "Redeploy",
            600,
            "The machine is moved to another host: memory and temporary disks are lost; it takes about 10 min.",
        ),
        ("Terminate", None, "The machine is deleted."),
        ("Hibernate", None, "The machine goes through “Hibernate”."),
        (None, 7200, "The machine goes through maintenance; it takes about 2 h."),
    ],
)
def test_what_happens_is_said_for_every_type(
    kind: str | None, seconds: int | None, text: str
) -> None:
    assert impact_text(kind, seconds) == text


DECISIONS = st.lists(
    st.sampled_from(
        [
            decided(),
            decided(by="bob"),
            decided("hold"),
            decided("hold", "bob", expires=60),
            decided(expires=30),
        ]
    ),
    max_size=4,
)
STANDINGS = st.builds(
    lambda of, decisions, grants, mode, now, live: standing(
        of, *decisions, grants=grants, mode=mode, now=now, live=live
    ),
    st.sampled_from(
        [
            event(),
            event(event_type="Freeze"),
            event(event_source="User"),
            event(event_status="Started", due=None),
            event(event_status="Paused"),
            event(due=None),
        ]
    ),
    DECISIONS,
    st.lists(
        st.sampled_from(
            [
                granted(),
                granted("sent"),
                granted("accepted"),
                granted("failed", status=400),
                granted("failed"),
            ]
        ),
        max_size=2,
    ),
    st.sampled_from(["on", "dry-run", "off"]),
    st.sampled_from([0.0, 30.0, 841.0, 901.0]),
    st.booleans(),
)


@given(STANDINGS)
def test_no_button_is_shown_that_the_gate_would_refuse_to_one_who_may(one: ApprovalStatus) -> None:
    """And one that the gate would take is shown, unless it would change nothing."""
    who = caller("alice", "approve", "hold", "operate")
    for choice in CHOICES:
        refusal = authorize(approval(choice, who, one.occurrence.event, at=one.now), one)
        if choice in available_decisions(one):
            assert refusal is None, (choice, refusal)
        elif refusal is None:
            idle = {
                "approve": one.quorum is None or one.active_grant is not None or one.is_claimed,
                "hold": bool(one.active_holds) or not one.is_open,
                "release": not one.is_open,
            }
            assert idle[choice], choice


@given(STANDINGS)
def test_a_message_changes_by_time_alone_when_it_says_that_it_will(one: ApprovalStatus) -> None:
    moment = refresh_time([one])
    assert moment is None or moment > one.now
    if one.is_open:
        assert moment == min(
            (
                at
                for at in (one.voting_closes_at, one.not_before)
                if at is not None and at > one.now
            ),
            default=None,
        )
    else:
        assert moment is None


@given(st.lists(STANDINGS, min_size=2, max_size=60))
def test_a_burst_is_one_message_of_a_few_lines(standings: Sequence[ApprovalStatus]) -> None:
    found = grouped_card(standings, "prod", link=lambda _, __: "u", code="123456")
    assert len(found.lines) <= MAX_LISTED_EVENTS
    assert found.title == f"{len(standings)} maintenance events at once"
    live = [one for one in standings if one.occurrence.live] or list(standings)
    if len(live) > MAX_LISTED_EVENTS:
        assert f"And {len(live) - MAX_LISTED_EVENTS} more" in said(found)


def test_a_burst_lists_first_what_waits_for_somebody() -> None:
    waiting = standing(event("E-9", resources=("db-9",)))
    others = [
        standing(event(f"E-{number}", event_type="Freeze", resources=(f"vm-{number}",)))
        for number in range(20)
    ]
    found = grouped_card([*others, waiting], "prod", link=lambda _, __: "u", code="123456")
    assert flat(found.lines[0].text) == "Reboot of db-9, not before 12:15, 0 of 2 votes"
    assert [one.label for one in found.lines[0].buttons] == ["Approve", "Hold"]
    assert "20 × Freeze, 1 × Reboot. 1 waiting for votes." in said(found)
    assert "And 11 more" in said(found)


# --- the history


def lines(book: Book) -> list[str]:
    """The history of everything that a relay said."""
    return [flat(timeline_line(one)) for one in book.said()]


def test_the_thread_tells_who_did_what_when(tmp_path: Any) -> None:
    book = Book(tmp_path / "relay.db")
    book.see(event())
    book.submit("hold", "bob", reason="backup runs")
    book.submit("release", "bob")
    book.submit("approve", "alice")
    book.submit("approve", caller("eve"))
    book.submit("approve", "bob")
    book.see(event(event_status="Started", due=None))
    book.see()
    assert lines(book) == [
        "12:00: Azure announced a Reboot of db-1.",
        "12:00: client:bob put it on hold (“backup runs”).",
        "12:00: client:bob released the hold.",
        "12:00: client:alice voted to approve, 1 of 2.",
        "12:00: client:eve was refused to approve: rule databases takes votes from others only.",
        "12:00: client:bob voted to approve, 2 of 2.",
        "12:00: Approved by rule databases: 2 of 2 votes.",
        "12:00: Azure began.",
        "12:00: The votes count no more: the event has changed.",
        "12:00: The StartRequest failed: the event started before a StartRequest was accepted.",
        "12:00: It is over: Azure has completed it.",
    ]
    book.close()


@pytest.mark.parametrize(
    "kind", [one for one in CATALOG if one.name.startswith("relay.")], ids=lambda one: one.name
)
def test_what_the_relay_says_of_itself_is_a_sentence_and_no_name_of_a_type(
    kind: EventDefinition,
) -> None:
    told = CloudEvent.build(
        {"type": kind.type, "time": "2026-01-01T12:00:00Z"},
        {"sink": "bus", "reason": "gone", "count": 1},
    )
    text = flat(timeline_line(told))
    assert text.startswith("12:00: ")
    assert text.endswith(": gone.")
    assert "{" not in text
    assert kind.name not in text


def test_a_sink_that_fails_is_named() -> None:
    told = CloudEvent.build(
        {"type": "io.imdsrelay.relay.sink-failing.v1", "time": "2026-01-01T12:00:00Z"},
        {"sink": "bus", "reason": "gone", "count": 1},
    )
    assert flat(timeline_line(told)) == "12:00: bus takes nothing: gone."
