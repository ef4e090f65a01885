"""Slack's slash command: what is listed, what is decided by it, and that nothing is approved which the person did not see."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from relay.approvals.request import DecisionKind
from relay.chat.platforms.slack.action_token import (
    GOOD_FOR,
    is_valid_action_token,
    make_action_token,
)
from tests.approvals.manual_clock import NOON
from tests.chat.running_relay import Stage, rule, stage
from tests.chat.slack_server import (
    ALICE,
    BOB,
    EVE,
    TEAM,
    Heard,
    Posted,
    SlackServer,
    hangs,
    member,
    slack,
    well_formed,
)
from tests.journey.relay_process import eventually

VOTERS = {"rules": [rule(2, f"slack:{TEAM}/{ALICE}", f"slack:{TEAM}/{BOB}")]}


@dataclass(frozen=True, slots=True)
class Typing:
    """A channel in which commands are typed."""

    slack: SlackServer
    relay: Stage

    async def types(self, text: str, user: str = ALICE, **changes: Any) -> Posted:
        """The card or the sentences that the person is shown, and nobody else."""
        return shown(await self.slack.calls_relay(self.slack.typed(text, user, **changes)))

    async def is_known(self, number: int = 1) -> None:
        """So many events are shown, and on record."""
        store = self.relay.running.relay.store

        async def settled() -> bool:
            return not await store.read(lambda tx: tx.deliveries.waiting())

        await eventually(lambda: len(self.slack.tops()) >= number)
        await eventually(settled)


def shown(heard: Heard) -> Posted:
    assert heard.status == 200
    assert heard.took < 3 + 7  # for a machine that stands still
    assert heard.body is not None
    assert heard.body["response_type"] == "ephemeral"
    assert well_formed(heard.body["blocks"])
    return Posted("1700000001.000001", heard.body["text"], heard.body["blocks"])


@asynccontextmanager
async def typing(
    directory: Path, *, public_url: str | None = "https://relay.example.com", **settings: Any
) -> AsyncIterator[Typing]:
    async with (
        slack() as here,
        stage(
            directory,
            [here.settings(**{"approve_in_chat": True, **settings})],
            approvals=VOTERS,
            public_url=public_url,
        ) as relay,
    ):
        here.relay = f"{relay.url}/v1/chat/ops"
        yield Typing(here, relay)


async def test_list_names_what_is_announced(tmp_path: Path) -> None:
    async with typing(tmp_path) as it:
        assert (await it.types("list")).words() == "Azure has announced nothing."
        event = it.relay.reboot("vm-0")
        await it.is_known()
        words = (await it.types("")).words()
        assert words.startswith(f"{event.event_id[:8]}  Reboot of vm-0, not before ")
        assert words.endswith(", 0 of 2 votes")


async def test_list_names_only_what_the_sink_is_about(tmp_path: Path) -> None:
    async with typing(tmp_path, match={"resources": ["db-*"]}) as it:
        it.relay.reboot("vm-0")
        it.relay.reboot("db-0")
        await it.is_known()
        assert "vm-0" not in (await it.types("list")).words()


async def test_approve_shows_the_event_and_asks_again_with_buttons(tmp_path: Path) -> None:
    """A slash command approves no state that was not seen."""
    async with typing(tmp_path) as it:
        event = it.relay.reboot("vm-0")
        await it.is_known()
        card = await it.types(f"approve {event.event_id[:4].lower()}")
        assert "Votes: 0 of 2" in card.words()
        assert set(card.buttons()) == {"Approve"}
        assert (await it.relay.event(event))["votes"] == []
        click = it.slack.clicked(card.buttons()["Approve"], card.ts)
        assert (await it.slack.calls_relay(click)).status == 200
        assert [one["principal"] for one in (await it.relay.event(event))["votes"]] == [
            f"slack:{TEAM}/{ALICE}"
        ]
        await eventually(lambda: len(it.slack.said) == 1)
        assert it.slack.said[0]["replace_original"] is True
        assert it.slack.said[0]["text"].startswith("Your vote is recorded: 1 of 2 votes.")


async def test_a_card_for_one_person_is_good_for_nobody_else_and_for_nothing_else(
    tmp_path: Path,
) -> None:
    async with typing(tmp_path) as it:
        event, other = it.relay.reboot("vm-0"), it.relay.reboot("vm-1")
        await it.is_known(2)
        card = await it.types(f"approve {event.event_id}")
        button = card.buttons()["Approve"]
        decision, revision, proof, event_id = button["value"].split(" ", 3)
        until, digest = proof.split(".")
        values = [
            f"hold {revision} {proof} {event_id}",
            f"approve {'0' * len(revision)} {proof} {event_id}",
            f"approve {revision} {proof} {other.event_id}",
            f"approve {revision} {int(until) - 1}.{digest} {event_id}",
            f"approve {revision} {until}.{'0' * 64} {event_id}",
            f"approve {revision} - {event_id}",
            f"approve {revision} 1.{digest} {event_id}",
        ]
        assert decision == "approve"
        clicks = [it.slack.clicked({**button, "value": value}, card.ts) for value in values]
        clicks.append(it.slack.clicked(button, card.ts, user=BOB))
        clicks.append(
            it.slack.clicked(
                button,
                card.ts,
                channel={"id": "C0OTHER"},
                container={
                    "type": "message",
                    "message_ts": card.ts,
                    "channel_id": "C0OTHER",
                    "is_ephemeral": True,
                },
            )
        )
        clicks.append(it.slack.clicked(button, it.slack.tops()[0].ts, message=it.slack.tops()[0]))
        for number, click in enumerate(clicks, start=1):
            assert (await it.slack.calls_relay(click)).status == 200
            await eventually(lambda number=number: len(it.slack.said) == number)
            assert "not good any more" in it.slack.said[-1]["text"]
        for one in (event, other):
            assert (await it.relay.event(one))["votes"] == []


@pytest.mark.parametrize(
    ("later", "good"), [(0, True), (GOOD_FOR, True), (GOOD_FOR + 1, False), (-1, False)]
)
def test_a_card_for_one_person_is_good_for_a_quarter_of_an_hour(
    later: float, *, good: bool
) -> None:
    """And none that was made in the future is."""
    who: tuple[str, str] = (ALICE, "C024BE91L")
    what: tuple[DecisionKind, str, str] = ("approve", "3f", "E-1")
    proof = make_action_token("xoxb-token", who, what, NOON)
    assert (
        is_valid_action_token(proof, "xoxb-token", who, what, NOON + timedelta(seconds=later))
        is good
    )
    assert not is_valid_action_token(proof, "xoxb-other", who, what, NOON)


async def test_hold_is_taken_at_once_with_its_reason(tmp_path: Path) -> None:
    async with typing(tmp_path) as it:
        event = it.relay.reboot("vm-0")
        await it.is_known()
        said = await it.types(f"hold {event.event_id[:8]} a backup <!channel> runs")
        assert said.words().startswith("It is on hold; a hold stops this relay alone")
        (hold,) = (await it.relay.event(event))["votes"]
        assert hold["decision"] == "hold"
        await eventually(lambda: "Held by" in it.slack.tops()[0].words())
        await eventually(
            lambda: any(
                "a backup <!channel> runs" in line for line in it.slack.thread(it.slack.tops()[0])
            )
        )
        assert all("<!channel>" not in one.text for one in it.slack.messages.values())
        card = await it.types(f"release {event.event_id[:8]}")
        assert set(card.buttons()) == {"Release the hold"}
        assert (await it.relay.event(event))["approval"]["state"] == "held"


async def test_a_command_that_comes_again_holds_once(tmp_path: Path) -> None:
    async with typing(tmp_path) as it:
        event = it.relay.reboot("vm-0")
        await it.is_known()
        typed = it.slack.typed(f"hold {event.event_id}")
        for _ in range(2):
            shown(await it.slack.calls_relay(typed))
        assert len((await it.relay.event(event))["votes"]) == 1


async def test_a_beginning_that_fits_several_or_none_decides_nothing_and_lists(
    tmp_path: Path,
) -> None:
    async with typing(tmp_path) as it:
        events = [it.relay.reboot(f"vm-{number}") for number in range(17)]
        first = {one.event_id[0] for one in events}
        await it.is_known(1)
        twice = next(
            char for char in first if sum(one.event_id.startswith(char) for one in events) > 1
        )
        said = await it.types(f"hold {twice}")
        assert said.words().startswith(f"More than one event of the document begins with {twice}.")
        said = await it.types("approve nothing-like-it")
        assert said.words().startswith("No event of the document begins with nothing-like-it.")
        assert said.words().endswith("… and 2 more.")
        assert [(await it.relay.event(one))["votes"] for one in events] == [[]] * 17


async def test_a_stranger_a_guest_and_somebody_unsure_get_a_polite_no(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    async with typing(tmp_path) as it:
        event = it.relay.reboot("vm-0")
        await it.is_known()
        said = await it.types(f"hold {event.event_id}", EVE)
        assert (
            said.words()
            == f"Nothing was decided: no rule of this relay names you, slack:{TEAM}/{EVE}."
        )
        it.slack.users[ALICE] = member(ALICE, is_restricted=True)
        for text in ("list", f"hold {event.event_id}"):
            assert (await it.types(text)).words() == "Nothing was decided: guests cannot decide."
        it.slack.trouble["users.info"] = hangs
        request.getfixturevalue("impatient")
        assert "Try again" in (await it.types(f"hold {event.event_id}", BOB)).words()
        assert "the channel in which" in (await it.types("list", BOB, channel_id="C0OTHER")).words()
        assert (await it.relay.event(event))["votes"] == []


async def test_what_is_not_understood_is_answered_with_what_is(tmp_path: Path) -> None:
    async with typing(tmp_path) as it:
        for text in ("help", "approve", "reboot everything", "list all", "x" * 3000):
            assert "approve, hold or release, and an EventId" in (await it.types(text)).words()


async def test_without_approval_in_the_chat_the_command_gives_a_link_of_its_own(
    tmp_path: Path,
) -> None:
    async with typing(tmp_path, approve_in_chat=False) as it:
        event = it.relay.reboot("vm-0")
        await it.is_known()
        urls = {it.slack.tops()[0].buttons()["Hold"]["url"]}
        for _ in range(2):
            card = await it.types(f"hold {event.event_id[:8]}", EVE)
            urls.add(card.buttons()["Hold"]["url"])
            assert "The page asks for this code: " in card.words()
        assert len(urls) == 3
        assert (await it.relay.event(event))["votes"] == []


async def test_where_no_link_can_be_made_the_card_says_so(tmp_path: Path) -> None:
    async with typing(tmp_path, public_url=None, approve_in_chat=False) as it:
        event = it.relay.reboot("vm-0")
        await it.is_known()
        card = await it.types(f"approve {event.event_id[:8]}")
        assert card.buttons() == {}
        assert "There is nothing to approve from here now." in card.words()
