"""How people answer in Mattermost: a button asks for a dialog, and the dialog's submission is the decision.

Mattermost signs none of its calls, so each call has to prove three things by itself. *What* is decided, and that this relay
offered it: the sealed proof in the button's context and in the dialog's state. *Where*: the post is one of this sink's, about
that event. *Who*: the server opens a dialog only against a trigger id that it has signed itself for the person who clicked,
seconds ago, and shows it to that person alone; so nobody else ever holds a dialog's state, and a forged click ends there.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import logging
import secrets
from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from relay.approvals.request import Caller
from relay.approvals.status import ApprovalStatus
from relay.chat import CallbackRefused, CallbackReply
from relay.chat.cards.buttons import available_decisions, confirmation_question
from relay.chat.cards.card import Button
from relay.chat.context import ChatContext
from relay.chat.platforms.mattermost.action_token import ActionToken, seal, unseal
from relay.chat.platforms.mattermost.api import Api
from relay.chat.platforms.mattermost.identity import LOOK_UP, MemberDirectory, NotEligible
from relay.chat.platforms.mattermost.post import MOST_ASKED, rendered
from relay.clock import Clock
from relay.errors import Deferred, StoreUnavailable

BUTTON_LASTS = 14 * 86400
"""Seconds for which a button can be clicked: longer than Azure's longest notice. NotBefore and the gate end it long before."""
DIALOG_LASTS = 600
"""Seconds for which a dialog can be submitted; answers are remembered for a day at least."""
UNVERIFIED = "Mattermost could not verify who you are: nothing was decided, try again."
GONE = "This message is not current any more: nothing was decided. Use the newest message about the event."
_LABELS = {"approve": "Approve", "hold": "Hold", "release": "Release the hold"}
_log = logging.getLogger(__name__)

_Id = Annotated[str, Field(pattern=r"^[a-z0-9]{26}$")]


class _Call(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True, frozen=True, hide_input_in_errors=True)


class _Context(_Call):
    proof: str


class _Click(_Call):
    """What the server sends when a button is clicked. Channel and post are those of the button itself."""

    user_id: _Id
    channel_id: _Id
    post_id: _Id
    trigger_id: str = Field(max_length=2048)
    context: _Context


class _Submission(_Call):
    """What the server sends when a dialog is submitted. Its channel and team are where the person happens to be."""

    type: Literal["dialog_submission"]
    user_id: _Id
    state: str
    cancelled: bool = False


class _No(Exception):  # not an error: what somebody is told
    """A polite refusal, for the person who clicked alone; nothing of it is another's words."""


class Interactions:
    """Of one sink. ``key`` gives the secret that proofs are sealed with, or raises ValueError; ``url`` is what the server calls."""

    def __init__(
        self,
        sink: str,
        channel: str,
        key: Callable[[], bytes],
        url: str,
        api: Api,
        people: MemberDirectory,
        context: ChatContext,
        clock: Clock,
    ) -> None:
        self._sink = sink
        self._channel = channel
        self._key = key
        self._url = url
        self._api = api
        self._people = people
        self._context = context
        self._clock = clock

    def integration(self, button: Button) -> dict[str, Any]:
        """What a button carries; the server keeps it to itself."""
        proof = ActionToken(
            "button",
            self._sink,
            self._channel,
            button.event_id,
            button.revision,
            button.decision,
            self._now() + BUTTON_LASTS,
            secrets.token_urlsafe(12),
        )
        return {"url": self._url, "context": {"proof": seal(self._key(), proof)}}

    async def handle_callback(self, body: bytes) -> CallbackReply:
        """Take a click or a submission. Raises ChatRefused for what proves nothing, or cannot be read."""
        call = _read(body)
        if isinstance(call, _Click):
            try:
                await self._clicked(call)
            except _No as no:
                return CallbackReply({"ephemeral_text": str(no), "skip_slack_parsing": True})
        elif not call.cancelled:
            try:
                await self._submitted(call)
            except _No as no:
                return CallbackReply({"error": str(no)})
        return CallbackReply({})

    async def _clicked(self, click: _Click) -> None:
        """Ask the person who clicked whether it is meant."""
        proof = self._open(click.context.proof, "button")
        if click.channel_id != self._channel:
            raise CallbackRefused("expected a click in the sink's channel, it was in another")
        standing = await self._standing(proof, click.post_id)
        if _clicker(click.trigger_id) != click.user_id:
            raise CallbackRefused(
                "expected a trigger id of the person who clicked, got another's or none"
            )
        await self._caller(proof, click.user_id)
        if standing.occurrence.revision != proof.revision:
            raise _No(
                "The event has changed since this button was made: nothing was decided. Look at the message again."
            )
        if proof.decision not in available_decisions(standing):
            raise _No(
                "This cannot be decided any more: nothing was decided. Look at the message again."
            )
        state = replace(
            proof,
            kind="dialog",
            expires=self._now() + DIALOG_LASTS,
            post=click.post_id,
            user=click.user_id,
        )
        await self._ask(click.trigger_id, state, standing)

    async def _ask(self, trigger: str, state: ActionToken, standing: ApprovalStatus) -> None:
        label = _LABELS[state.decision]
        dialog = {
            "callback_id": "decision",
            "title": label,
            "introduction_text": rendered(
                confirmation_question(state.decision, standing), {}, most=MOST_ASKED
            ),
            "elements": [],
            "submit_label": label,
            "notify_on_cancel": False,
            "state": seal(self._key(), state),
        }
        try:
            said = await self._api.ask(
                "POST",
                "actions/dialogs/open",
                {"trigger_id": trigger, "url": self._url, "dialog": dialog},
                seconds=LOOK_UP,
            )
        except Deferred as error:
            self._failed("a dialog could not be opened", error)
            raise _No(UNVERIFIED) from None
        if "trigger_id" in said.code:
            raise CallbackRefused(
                f"expected a trigger id that Mattermost has signed, it refuses this one ({said.code})"
            )
        if not said.ok:
            self._failed("a dialog could not be opened", self._api.delivery_error(said))
            raise _No(UNVERIFIED)

    async def _submitted(self, submission: _Submission) -> None:
        """Hand the decision to the gate; it is on disk when this returns."""
        proof = self._open(submission.state, "dialog")
        if submission.user_id != proof.user:
            raise CallbackRefused(
                "expected the dialog of the person who submits it, it is another's"
            )
        await self._standing(proof, proof.post)
        caller = await self._caller(proof, proof.user)
        answer = await self._context.decisions.decide(
            caller,
            event_id=proof.event_id,
            decision=proof.decision,
            revision=proof.revision,
            request_id=hashlib.sha256(f"{proof.nonce}\n{proof.user}".encode()).hexdigest(),
        )
        if not answer.accepted:
            raise _No(f"Refused: {answer.body.get('detail', 'no reason is known')}.")

    def _open(self, text: str, kind: Literal["button", "dialog"]) -> ActionToken:
        """What was sealed for this sink and is still good."""
        try:
            proof = unseal(self._key(), text, kind)
        except ValueError as error:
            raise CallbackRefused(
                f"the secret of this sink cannot be used any more: {error}"
            ) from None
        if (proof.sink, proof.channel) != (self._sink, self._channel):
            raise CallbackRefused("expected a proof of this sink and channel, it is another's")
        if self._now() >= proof.expires:
            raise _No(
                GONE
                if kind == "button"
                else "This took too long: nothing was decided. Click the button again."
            )
        return proof

    async def _standing(self, proof: ActionToken, post: str) -> ApprovalStatus:
        try:
            standing = await self._context.statuses.shown_in(self._sink, post, proof.event_id)
        except StoreUnavailable:
            raise _No(
                "The decision cannot be recorded now: nothing was decided, try again."
            ) from None
        if standing is None:
            raise _No(GONE)
        return standing

    async def _caller(self, proof: ActionToken, user: str) -> Caller:
        try:
            principal = await self._people.principal(user)
        except NotEligible as error:
            _log.warning(
                "%s: %s by user %s was refused: %s", self._sink, proof.decision, user, error
            )
            raise _No(str(error)) from None
        except Deferred as error:
            self._failed("a person could not be verified", error)
            raise _No(UNVERIFIED) from None
        caller = self._context.decisions.caller(principal, "mattermost")
        if caller is None:
            _log.warning(
                "%s: %s by the stranger %s was refused", self._sink, proof.decision, principal
            )
            raise _No(
                f"You are not among those who decide here: nothing was decided. To the relay you are `{principal}`."
            )
        return caller

    def _failed(self, what: str, error: Deferred) -> None:
        _log.warning("%s: %s, nothing was decided: %s", self._sink, what, error.reason)

    def _now(self) -> int:
        return int(self._clock.now().timestamp())


def _read(body: bytes) -> _Click | _Submission:
    try:
        fields = orjson.loads(body)
        if isinstance(fields, dict) and fields.get("type") == "dialog_submission":
            return _Submission.model_validate(fields)
        return _Click.model_validate(fields)
    except (orjson.JSONDecodeError, ValidationError):
        raise CallbackRefused(
            "expected a click or a submission of Mattermost, got something else", status=400
        ) from None


def _clicker(trigger: str) -> str | None:
    """For whom the server has made a trigger id: it shows the dialog to nobody else.

    Its form is base64 of ``<id>:<user>:<milliseconds>:<signature>`` since Mattermost 5.6. Whether the signature holds, the
    server says when the dialog is opened.
    """
    try:
        parts = base64.b64decode(trigger, validate=True).decode().split(":")
    except (binascii.Error, ValueError):
        return None
    return parts[1] if len(parts) == 4 else None
