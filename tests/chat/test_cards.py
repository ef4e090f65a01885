"""What cards say about one event and about several, their buttons, and the lines of a thread."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.approvals import ApprovalsSettings
from relay.approvals.admission import SENT_BEFORE_NOTICE, find_decision_refusal
from relay.approvals.request import HOLD_NOTICE, DecisionKind
from relay.approvals.status import ApprovalStatus
from relay.chat.cards import MAX_LISTED_EVENTS, WHAT_HOLD_DOES, event_card, grouped_card
from relay.chat.cards.card import Buttons, Card, available_decisions
from relay.chat.cards.wording import (
    next_refresh_time,
    time_left,
    time_left_changes_at,
    timeline_line,
    voting_closed_lines,
)
from relay.events.build import CATALOG
from relay.events.cloudevent import CloudEvent
from relay.events.data_types import LimitWait
from relay.events.timestamps import format_rfc3339
from relay.sentences import LIMIT_NOTICE, RELAY_EVENTS, impact_text
from relay.settings import MAX_NAMES, join_names
from tests.approvals.builders import (
    REBOOT,
    VOTES,
    ApprovalFile,
    build_caller,
    build_decision,
    build_event,
    build_grant,
    build_occurrence,
    build_request,
    build_status,
    started,
)
from tests.chat.wall_platform import plain_text
from tests.clocks import NOON

BEGINS = (
    "Azure begins at 12:15 or soon after, whether or not anybody answers; "
    "earlier only when it is approved. There are at most 16 min left."
)
MINUTE = timedelta(minutes=1)
DECISIONS: tuple[DecisionKind, ...] = ("approve", "hold", "release")


def all_text(card: Card) -> str:
    """Return every text of a card, a line each."""
    facts = [f"{label}: {plain_text(text)}" for label, text in card.facts]
    texts = map(plain_text, (*card.notes, *(line.text for line in card.lines)))
    first, last = (card.title, plain_text(card.summary)), (*labels(card), card.footer)
    return "\n".join([*first, *facts, *texts, *last])


def labels(card: Card) -> list[str]:
    return [button.label for button in card.buttons]


def card_of(status: ApprovalStatus) -> Card:
    """Return the card of a message about one event whose buttons lead to a page."""
    return event_card(status, Buttons(public_url="https://relay.example.com"))


def test_a_message_says_what_happens_to_which_machines_when_and_by_whom() -> None:
    reboot = build_event(resources=("db-1", "db-2"), duration=30, description="Host maintenance")
    text = all_text(card_of(build_status(reboot)))
    assert text.splitlines() == [
        "Reboot of db-1, db-2",
        BEGINS,
        "Machines: db-1, db-2",
        "What happens: Each machine is rebooted: what is in memory is lost; it takes about 30 s.",
        "Who started it: Azure itself",
        "Azure says: Host maintenance",
        "Rule: databases: 2 votes from group:oncall, client:drain",
        (
            "Votes: 0 of 2; 2 missing, from client:alice, client:bob, client:drain, until 12:14 "
            "(at most 15 min left)"
        ),
        WHAT_HOLD_DOES,
        "Azure proceeds at NotBefore regardless.",
        "Approve",
        "Hold",
        "E-1 · prod",
    ]


def test_a_held_event_says_what_a_hold_means_and_offers_to_release_it() -> None:
    card = card_of(build_status(None, build_decision("hold", expires=3600)))
    assert labels(card) == ["Approve", "Release the hold"]
    assert HOLD_NOTICE.lower() in all_text(card).lower()
    assert "Held by: client:alice until 13:00" in all_text(card)


LIMIT = LimitWait(
    limit="databases", max=1, machines=["db-2"], behind=None, until=format_rfc3339(NOON + MINUTE)
)
WAITING = replace(build_status(None, *VOTES), waiting_for=(LIMIT,))
ENDED = {
    outcome: replace(build_status(), occurrence=build_occurrence(live=False, outcome=outcome))
    for outcome in ("completed", "canceled", "unknown")
}
STARTED = build_status(started(REBOOT))


MACHINES = tuple(f"db-{number:02d}" for number in range(12))
ALICE, BOB = build_decision(), build_decision(by="bob")
ACCEPTED, SENT = build_grant("accepted"), build_grant("sent")
QUORUM = {"each_resource": True, "from": ["client:db", "client:web"], "close_before": "60s"}
EACH = ApprovalsSettings.model_validate({"rules": [{"name": "each", "approve": QUORUM}]})
TWO = build_event(resources=("db-1", "web-1"))
DB_VOTE, LATE_VOTE = build_decision(by="db", of=TWO), build_decision(at=NOON + 13 * MINUTE)
MOVED = build_status(build_event(due=1800), ALICE, BOB, grants=[ACCEPTED])
ACCEPTED_STARTED = build_status(started(REBOOT), ALICE, grants=[ACCEPTED])
IS_ACCEPTED = "It is approved: Azure has accepted the StartRequest."


def waiting(**changes: object) -> ApprovalStatus:
    return replace(WAITING, waiting_for=(LIMIT | changes,))  # type: ignore[arg-type]  # each row gives its fields


@pytest.mark.parametrize(
    ("status", "tone", "words", "absent"),
    [
        (build_status(None, ALICE), "waiting", "Votes: 1 of 2: client:alice; 1 missing", "closed"),
        (build_status(None, build_decision("hold")), "held", "Held by: client:alice", "Hold\n"),
        (build_status(grants=[build_grant()]), "approved", "is about to be sent", "left"),
        (build_status(grants=[SENT]), "approved", "the StartRequest was sent", "left"),
        # votes count no more once the event has started, or changed after its StartRequest
        (build_status(None, ALICE, BOB, grants=[SENT]), "approved", "Votes: 2 of 2: ", "missing"),
        (MOVED, "approved", IS_ACCEPTED, "Votes"),
        (ACCEPTED_STARTED, "running", IS_ACCEPTED, "Votes"),
        (STARTED, "running", "Rule: databases: 2 votes from", "Votes"),
        (STARTED, "running", "Azure has begun.", "left"),
        (ENDED["unknown"], "over", "whether it happened is not known", "Rule"),
        (ENDED["completed"], "over", "Azure has completed it", "Rule"),
        (ENDED["canceled"], "over", "it does not happen", "Rule"),
        (build_status(mode="off"), "waiting", "Approvals are off", "Approve"),
        (build_status(mode="dry-run"), "waiting", "no StartRequest is sent", "off"),
        (build_status(now=901), "waiting", "was 12:15: Azure can begin at any moment.", "left"),
        (build_status(None, LATE_VOTE, now=841), "waiting", "; voting closed at 12:14\n", "miss"),
        (build_status(TWO, DB_VOTE, settings=EACH), "waiting", "spoken for web-1 yet\n", "closed"),
        (build_status(TWO, DB_VOTE, settings=EACH, now=841), "waiting", "for web-1\n", "yet"),
        (build_status(build_event(event_type="Freeze")), "waiting", "no rule allows", "Votes"),
        (build_status(build_event(event_source="User")), "waiting", "approved automatically", "V"),
        (WAITING, "waiting", "(at most 1 machine at once): db-2 has the slots, until 12", "begun"),
        (WAITING, "waiting", "this relay would start: Azure proceeds at NotBefore", "to be sent"),
        (replace(WAITING, grants=(build_grant(),)), "waiting", "waits for limit", "to be sent"),
        (waiting(behind="E-7", until=None), "waiting", "event E-7 comes first.", "12:01"),
        (waiting(max=12, machines=MACHINES, until=None), "waiting", "and 2 more", "db-10"),
    ],
)
def test_each_state_is_said_in_words(
    status: ApprovalStatus, tone: str, words: str, absent: str
) -> None:
    card = card_of(status)
    assert card.tone == tone
    assert words in all_text(card)
    assert absent not in all_text(card)


def test_a_grouped_message_says_what_waits_for_a_limit() -> None:
    statuses = [WAITING, *(build_status(build_event(f"E-{number}")) for number in range(2, 8))]
    text = all_text(grouped_card(statuses, Buttons()))
    assert "Reboot of db-1, not before 12:15, waits for limit databases" in text
    assert "6 waiting for votes, 1 waiting for a limit. " in text
    assert LIMIT_NOTICE[1:] in text
    assert next_refresh_time([WAITING]) == NOON + MINUTE + timedelta(seconds=1)


def test_every_text_about_a_hold_says_that_an_earlier_start_request_may_count() -> None:
    sent = build_grant("sent")
    buttons = {button.decision: button for button in card_of(build_status(grants=[sent])).buttons}
    assert SENT_BEFORE_NOTICE.lower() in plain_text(buttons["hold"].question).lower()
    held = card_of(build_status(None, build_decision("hold"), grants=[sent]))
    assert SENT_BEFORE_NOTICE.lower() in all_text(held).lower()


def test_a_message_that_leads_nowhere_says_where_to_decide() -> None:
    card = event_card(build_status(), Buttons())
    assert card.buttons == ()
    assert "imds-relay approve|hold E-1" in all_text(card)


def test_many_machines_are_counted() -> None:
    names = [f"vm-{number}" for number in range(100)]
    assert join_names(names) == f"{', '.join(names[:MAX_NAMES])} and 90 more"
    assert len(all_text(card_of(build_status(build_event(resources=tuple(names)))))) < 1500


def test_what_happens_is_said_for_every_type() -> None:
    for event_type, seconds, text in (
        ("Freeze", 5, "paused for about 5 s: memory and open files stay, connections can drop."),
        ("Freeze", None, "paused for a while: memory and open files stay, connections can drop."),
        ("Redeploy", 600, "memory and temporary disks are lost; it takes about 10 min."),
        ("Terminate", None, "The machine is deleted."),
        ("Hibernate", None, "The machine goes through “Hibernate”."),
        (None, 7200, "The machine goes through maintenance; it takes about 2 h."),
    ):
        assert impact_text(event_type, seconds).endswith(text)


EVENTS = [
    *(build_event(), build_event(event_type="Freeze"), build_event(event_source="User")),
    *(started(REBOOT), build_event(event_status="Paused")),
    build_event(due=None),
]
CAST = [
    *(build_decision(), build_decision(by="bob"), build_decision(expires=30)),
    *(build_decision("hold"), build_decision("hold", "bob", expires=60)),
]
GRANTS = [
    *(build_grant(), build_grant("sent"), build_grant("accepted"), build_grant("failed")),
    build_grant("failed", status=400),
]
STATUSES = st.builds(
    lambda scheduled, decisions, grants, mode, now, live: build_status(
        scheduled, *decisions, grants=grants, mode=mode, now=now, live=live
    ),
    st.sampled_from(EVENTS),
    st.lists(st.sampled_from(CAST), max_size=4),
    st.lists(st.sampled_from(GRANTS), max_size=2),
    st.sampled_from(["on", "dry-run", "off"]),
    st.sampled_from([0.0, 30.0, 841.0, 901.0]),
    st.booleans(),
)


@given(STATUSES)
def test_no_button_is_shown_that_the_gate_refuses_to_one_who_may(status: ApprovalStatus) -> None:
    """And one that the gate would take is shown, unless it would change nothing."""
    operator = build_caller("alice", "approve", "hold", "operate")
    changes_nothing = {
        "approve": status.quorum is None or status.is_granted_or_claimed,
        "hold": bool(status.active_holds) or not status.is_startable,
        "release": not status.is_startable,
    }
    for decision in DECISIONS:
        request = build_request(decision, operator, status.occurrence.event, at=status.now)
        refusal = find_decision_refusal(request, status)
        if decision in available_decisions(status):
            assert refusal is None, (decision, refusal)
        elif refusal is None:
            assert changes_nothing[decision], decision


@given(st.floats(-10.0, 900.0), st.sampled_from([None, 0.0, 59.0, 60.0, 600.0, 90000.0]))
def test_the_time_left_is_true_until_it_changes(now: float, close_before: float | None) -> None:
    """Between two edits nobody has more time than the message says."""
    approve = {"votes": 1, "from": ["client:alice"], "close_before": f"{close_before or 0:g}s"}
    rule = {"name": "all", "approve": approve if close_before is not None else "automatic"}
    settings = ApprovalsSettings.model_validate({"rules": [rule]})
    status = build_status(now=now, settings=settings)
    for until in (status.not_before, status.voting_closes_at):
        text = time_left(status, until)
        assert (text is None) == (not status.is_startable)
        if text is None or until is None:
            continue
        changes_at = time_left_changes_at(status)
        for moment in (status.now, status.now if changes_at is None else changes_at):
            minutes = (until - moment).total_seconds() / 60
            number, unit = re.findall(r"(\d+) (min|h|days)", text)[0]
            shown = int(number) * {"min": 1, "h": 60, "days": 1440}[unit]
            if until == status.not_before or not status.is_past_voting_close_time:
                assert minutes <= shown
    if status.is_startable and not status.is_past_voting_close_time:
        assert next_refresh_time([status]) is not None


def test_how_much_time_is_left() -> None:
    for seconds, text in (
        (0.5, "1 min"),
        (60.0, "1 min"),
        (61.0, "2 min"),
        (5400.0, "90 min"),
        (7200.0, "2 h"),
        (7201.0, "3 h"),
        (86400.0, "24 h"),
        (86401.0, "48 h"),
        (4 * 86400.0, "4 days"),
    ):
        status = build_status(build_event(due=seconds, event_type="Redeploy"))
        assert time_left(status, status.not_before) == f"at most {text} left"


def test_a_message_about_an_event_a_week_ahead_is_edited_23_times() -> None:
    """docs/chat/README.md gives the number."""
    status = build_status(build_event(due=7 * 86400.0, event_type="Redeploy"))
    minutes = []
    while (moment := next_refresh_time([status])) is not None:
        status = replace(status, now=moment)
        minutes.append(7 * 1440 - (moment - NOON).total_seconds() / 60)
    assert minutes[:6] == [days * 1440 for days in (6, 5, 4, 3, 2, 1)]
    hours = [left for left in minutes[6:] if left > 60]
    assert hours == [720, 480, 360, 240, 180, 120, 90]
    assert len(minutes) == 23


@given(STATUSES)
def test_a_message_changes_by_time_alone_when_it_says_that_it_will(status: ApprovalStatus) -> None:
    limits = [status.voting_closes_at] if status.is_startable else []
    limits.append(time_left_changes_at(status))
    if status.occurrence.live:
        if not status.occurrence.event.is_started:
            limits.append(status.not_before)
        limits += [status.decision_expires_at(decision) for decision in status.decisions]
    future = [limit for limit in limits if limit is not None and limit > status.now]
    assert next_refresh_time([status]) == min(future, default=None)


@given(STATUSES, st.sampled_from([1.0, 30.0, 600.0, 841.0, 901.0]))
def test_a_card_is_the_same_until_its_refresh_time(status: ApprovalStatus, seconds: float) -> None:
    """Votes and holds that expire are events of their own, but not every sink wants those."""
    later = replace(status, now=status.now + timedelta(seconds=seconds))
    refresh_at = next_refresh_time([status])
    if refresh_at is None or later.now < refresh_at:
        assert card_of(later) == card_of(status)


@given(st.lists(STATUSES, min_size=2, max_size=60))
def test_many_events_at_once_are_a_message_of_few_lines(statuses: Sequence[ApprovalStatus]) -> None:
    card = grouped_card(statuses, Buttons(public_url="https://relay.example.com"))
    assert len(card.lines) <= MAX_LISTED_EVENTS
    assert card.title == f"{len(statuses)} maintenance events at once"
    live = [status for status in statuses if status.occurrence.live] or list(statuses)
    if len(live) > MAX_LISTED_EVENTS:
        assert f"And {len(live) - MAX_LISTED_EVENTS} more" in all_text(card)


def test_a_grouped_message_lists_first_what_waits_for_somebody() -> None:
    waiting = build_status(build_event("E-9", resources=("db-9",)))
    others = [
        build_status(build_event(f"E-{number}", event_type="Freeze", resources=(f"vm-{number}",)))
        for number in range(20)
    ]
    card = grouped_card([*others, waiting], Buttons(public_url="https://relay.example.com"))
    assert plain_text(card.lines[0].text) == "Reboot of db-9, not before 12:15, 0 of 2 votes"
    assert [button.label for button in card.lines[0].buttons] == ["Approve", "Hold"]
    assert "20 × Freeze, 1 × Reboot. 1 waiting for votes." in all_text(card)
    assert "And 11 more" in all_text(card)


def test_a_grouped_message_does_not_wait_for_votes_after_voting_closed() -> None:
    statuses = [build_status(build_event(f"E-{number}"), now=841) for number in range(6)]
    card = grouped_card(statuses, Buttons())
    assert "6 × Reboot. The first begins at 12:15" in all_text(card)
    assert "waiting for votes" not in all_text(card)


# --- the lines of a thread


def thread_lines(book: ApprovalFile) -> list[str]:
    return [plain_text(timeline_line(event)) for event in book.events()]


def test_the_thread_tells_who_did_what_when(tmp_path: Path) -> None:
    book = ApprovalFile(tmp_path / "relay.db")
    book.record_document(build_event())
    book.submit("hold", "bob", reason="backup runs", ticket="CHG-7")
    book.submit("release", "bob")
    book.submit("approve", "alice")
    book.submit("approve", build_caller("eve"))
    book.submit("approve", "bob")
    book.record_document(started(REBOOT))
    book.record_document()
    assert thread_lines(book) == [
        "12:00: Azure announced a Reboot of db-1.",
        "12:00: client:bob put it on hold (“backup runs”, ticket CHG-7).",
        "12:00: client:bob released the hold.",
        "12:00: client:alice voted to approve, 1 of 2.",
        "12:00: client:eve tried to approve, refused: rule databases takes votes from others only.",
        "12:00: client:bob voted to approve, 2 of 2.",
        "12:00: Approved by rule databases: 2 of 2 votes.",
        "12:00: Azure began.",
        "12:00: The votes count no more: the event has changed.",
        "12:00: The StartRequest failed: the event started before a StartRequest was accepted.",
        "12:00: It is over: Azure has completed it.",
    ]
    book.close()


def test_the_thread_says_that_votes_are_void_only_if_the_revision_changed(tmp_path: Path) -> None:
    """The description is not part of the revision, so votes on the old text still count."""
    book = ApprovalFile(tmp_path / "relay.db")
    book.record_document(build_event(description="Host maintenance"))
    book.submit("approve", "alice")
    book.record_document(build_event(description="Urgent host maintenance"))
    assert book.status().vote_count == 1
    book.record_document(build_event(description="Urgent host maintenance", due=1800))
    assert book.status().vote_count == 0
    assert thread_lines(book)[2:] == [
        "12:00: Azure changed description.",
        "12:00: Azure changed notBefore; votes on the former state do not count.",
        "12:00: The votes count no more: the event has changed.",
    ]
    book.close()


def test_what_the_relay_says_of_itself_is_a_sentence_and_no_name_of_a_type() -> None:
    for definition in CATALOG:
        if not definition.name.startswith("relay."):
            continue
        relay_event = CloudEvent.build(
            {"type": definition.type, "time": "2026-01-01T12:00:00Z"},
            {"sink": "bus", "reason": "gone", "count": 1},
        )
        text = plain_text(timeline_line(relay_event))
        assert ("bus" in text) == ("{sink}" in RELAY_EVENTS[definition.name])
        assert text.startswith("12:00: ")
        assert text.endswith(": gone.")
        assert "{" not in text
        assert definition.name not in text


def test_voting_that_closed_is_told_once_and_where_votes_are_missing_alone() -> None:
    late_bob = build_decision(by="bob", at=NOON + 13 * MINUTE)
    missing = build_status(None, LATE_VOTE, now=841)
    given = build_status(None, LATE_VOTE, late_bob, now=841)
    (line,) = voting_closed_lines(missing, since=NOON)
    assert plain_text(line) == "12:14: Voting closed, with 1 of 2 votes."
    assert voting_closed_lines(missing, since=NOON + 15 * MINUTE) == ()
    assert voting_closed_lines(given, since=NOON) == ()
