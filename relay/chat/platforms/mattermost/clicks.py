"""Takes decisions in Mattermost: a click opens a dialog, and its submission is the decision.

Mattermost does not sign its calls (docs/protocol.md#mattermost), so each call must prove three
things:

- What is decided: the action token in the button and in the dialog proves that this relay offered
  the decision. The server keeps the token of a button to itself.
- Where: the post must be one that this sink made, about that event.
- Who: the server opens a dialog only for a fresh trigger id that it signed for the person who
  clicked, and shows the dialog to that person only. So nobody else gets the dialog's token, and a
  forged click ends there. The server also confirms that this is an active member of the channel:
  guests, bots and people of other servers must not decide, whatever the rules say.

Source: https://developers.mattermost.com/integrate/plugins/interactive-messages/
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
import logging
import re
import secrets
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import orjson
from pydantic import AliasPath, BaseModel, ConfigDict, Field, ValidationError

from relay.approvals.request import Caller, DecisionKind
from relay.approvals.status import ApprovalStatus
from relay.chat import CallbackRefused, Reply, raise_deferred_if_secret_unusable
from relay.chat.cards.card import LABELS, Button, available_decisions, confirmation_question
from relay.chat.context import ChatContext
from relay.chat.platforms.mattermost.api import MattermostApi, Refused, Settings
from relay.chat.platforms.mattermost.posts import render_markdown
from relay.clock import Clock
from relay.errors import Deferred, RelayError, StoreUnavailable
from relay.logs import throttled_sink_log

BUTTON_LIFETIME = 14 * 86400
"""Seconds, longer than Azure's longest notice. NotBefore and the gate end a button earlier."""
DIALOG_LIFETIME = 600
"""Seconds. The relay remembers its answers for a day at least, so a repeat stays one vote."""
MAX_QUESTION_LENGTH = 600
"""Characters of a dialog's question, before they are escaped."""
LOOKUP_TIMEOUT = 5.0
"""Seconds in which the server must identify a person."""
_TEAM_ID = re.compile(r"[a-z0-9]{26}")
_EXPIRED = {
    "button": "This message is not current any more: nothing was decided. "
    "Use the newest message about the event.",
    "dialog": "This took too long: nothing was decided. Click the button again.",
}
_log = logging.getLogger(__name__)

TokenKind = Literal["button", "dialog"]
_Id = Annotated[str, Field(pattern=r"^[a-z0-9]{26}$")]


class NotDecided(RelayError):
    """Why nothing was decided. Only the person who clicked sees it."""


class NotEligible(NotDecided):
    """The person must not decide."""


class _Model(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True, frozen=True, hide_input_in_errors=True)


class Click(_Model):
    """A click on a button. Channel and post are those of the button."""

    user_id: _Id
    channel_id: _Id
    post_id: _Id
    trigger_id: str = Field(max_length=2048)
    proof: str = Field(validation_alias=AliasPath("context", "proof"))


class Submission(_Model):
    """A submitted or canceled dialog. ``state`` is the token that the relay put into it."""

    type: Literal["dialog_submission"]
    user_id: _Id
    state: str
    cancelled: bool = False


class ActionToken(_Model):
    """One decision about one state of one event.

    ``expires_at`` is in seconds since 1970. ``nonce`` distinguishes the token from all others.
    ``post_id`` and ``user_id`` say for a dialog where its button was and who clicked.
    """

    event_id: str
    revision: str
    decision: DecisionKind
    expires_at: int
    nonce: str
    post_id: str = ""
    user_id: str = ""

    def sign(self, key: bytes) -> str:
        """Return the token as text: its fields in base64, a dot, and HMAC-SHA256 over them."""
        payload = base64.urlsafe_b64encode(self.model_dump_json().encode()).decode()
        return f"{payload}.{_mac(key, payload)}"


def token_key(settings: Settings, kind: TokenKind) -> bytes:
    """Return the key of tokens, which are worth nothing in another place. Raises ValueError."""
    use = f"imds-relay mattermost 1\n{kind}\n{settings.name}\n{settings.channel}"
    return hmac.digest(settings.signing_key(), use.encode(), "sha256")


def read_token(key: bytes, text: str) -> ActionToken:
    """Return a token, which may have expired. Raises CallbackRefused if the key is another's."""
    payload, _, mac = text.partition(".")
    if not hmac.compare_digest(_mac(key, payload).encode(), mac.encode(errors="replace")):
        raise CallbackRefused(
            "expected a token that this relay made for this use in this channel, "
            "its signature is invalid"
        )
    try:
        return ActionToken.model_validate_json(base64.urlsafe_b64decode(payload))
    except ValueError:
        raise CallbackRefused("expected a token of this version of the relay") from None


def _mac(key: bytes, payload: str) -> str:
    return hmac.digest(key, payload.encode(errors="replace"), "sha256").hex()


def parse_payload(body: bytes) -> Click | Submission:
    """Return what Mattermost sent. Raises CallbackRefused (400) for anything else."""
    try:
        fields = orjson.loads(body)
        if isinstance(fields, dict) and fields.get("type") == "dialog_submission":
            return Submission.model_validate(fields)
        return Click.model_validate(fields)
    except (orjson.JSONDecodeError, ValidationError):
        raise CallbackRefused(
            "expected a click or a submission of Mattermost, got something else", status=400
        ) from None


def user_of_trigger(trigger_id: str) -> str | None:
    """Return the user for whom the server made a trigger id; None if it is malformed.

    The form is base64 of ``<id>:<user>:<milliseconds>:<signature>`` since Mattermost 5.6. The
    server checks the signature when the dialog is opened.
    """
    try:
        parts = base64.b64decode(trigger_id, validate=True).decode().split(":")
    except (binascii.Error, ValueError):
        return None
    return parts[1] if len(parts) == 4 else None


class Clicks:
    def __init__(
        self, settings: Settings, context: ChatContext, api: MattermostApi, clock: Clock
    ) -> None:
        self._settings = settings
        self._context = context
        self._api = api
        self._clock = clock
        self._warn = throttled_sink_log(_log, clock, settings.name)
        # The configuration requires public_url (`Settings.needs_public_url`).
        self._callback_url = f"{context.public_url}/v1/chat/{settings.name}"

    def integration(self, button: Button) -> dict[str, Any]:
        """Return what a button contains. The server does not show it to anybody."""
        token = ActionToken(
            event_id=button.event_id,
            revision=button.revision,
            decision=button.decision,
            expires_at=self._now() + BUTTON_LIFETIME,
            nonce=secrets.token_urlsafe(12),
        )
        with raise_deferred_if_secret_unusable("secret"):
            proof = token.sign(token_key(self._settings, "button"))
        return {"url": self._callback_url, "context": {"proof": proof}}

    async def handle(self, body: bytes) -> Reply:
        """Handle a call; its decision is on disk then. Raises CallbackRefused."""
        payload = parse_payload(body)
        try:
            if isinstance(payload, Click):
                await self._ask(payload)
            elif not payload.cancelled:
                await self._decide(payload)
            return {}
        except NotDecided as error:
            refusal = str(error)
            if isinstance(error, NotEligible):
                self._warn(f"refused user {payload.user_id}: {refusal}")
        except StoreUnavailable:
            refusal = "The decision cannot be recorded now: nothing was decided, try again."
        except Deferred as error:
            self._warn(f"nothing was decided: {error.reason}")
            refusal = "Mattermost could not verify who you are: nothing was decided, try again."
        if isinstance(payload, Click):
            return {"ephemeral_text": refusal, "skip_slack_parsing": True}
        return {"error": refusal}

    async def _ask(self, click: Click) -> None:
        token = self._read_token(click.proof, "button")
        if click.channel_id != self._settings.channel:
            raise CallbackRefused("expected a click in the sink's channel, it was in another")
        status = await self._find_status(token, click.post_id)
        if user_of_trigger(click.trigger_id) != click.user_id:
            raise CallbackRefused(
                "expected a trigger id of the person who clicked, got another person's or none"
            )
        await self._caller(click.user_id)
        if status.occurrence.revision != token.revision:
            raise NotDecided(
                "The event has changed since this button was made: nothing was decided. "
                "Look at the message again."
            )
        if token.decision not in available_decisions(status):
            raise NotDecided(
                "This cannot be decided any more: nothing was decided. Look at the message again."
            )
        changes = {
            # The decision of a button can be taken, ended, and taken again from the same post.
            "nonce": secrets.token_urlsafe(12),
            "expires_at": self._now() + DIALOG_LIFETIME,
            "post_id": click.post_id,
            "user_id": click.user_id,
        }
        label, question = LABELS[token.decision], confirmation_question(token.decision, status)
        dialog = {
            "callback_id": "decision",
            "title": label,
            "introduction_text": render_markdown(question, {}, limit=MAX_QUESTION_LENGTH),
            "elements": [],
            "submit_label": label,
            "notify_on_cancel": False,
            "state": token.model_copy(update=changes).sign(token_key(self._settings, "dialog")),
        }
        request = {"trigger_id": click.trigger_id, "url": self._callback_url, "dialog": dialog}
        try:
            await self._api.call("POST", "actions/dialogs/open", request)
        except Refused as error:
            if "trigger_id" in error.error_id:
                raise CallbackRefused(
                    "expected a trigger id that Mattermost signed, "
                    f"it refuses this trigger id ({error.error_id})"
                ) from None
            raise

    async def _decide(self, submission: Submission) -> None:
        token = self._read_token(submission.state, "dialog")
        if submission.user_id != token.user_id:
            raise CallbackRefused(
                "expected the dialog of the person who submits it, it is another person's"
            )
        await self._find_status(token, token.post_id)
        answer = await self._context.decisions.decide(
            await self._caller(token.user_id),
            event_id=token.event_id,
            decision=token.decision,
            revision=token.revision,
            request_id=hashlib.sha256(f"{token.nonce}\n{token.user_id}".encode()).hexdigest(),
        )
        if not answer.accepted:
            raise NotDecided(f"Refused: {answer.body.get('detail', 'no reason is known')}.")

    def _read_token(self, text: str, kind: TokenKind) -> ActionToken:
        """Return a token that this sink made for this use, and that has not expired."""
        try:
            key = token_key(self._settings, kind)
        except ValueError as error:
            raise CallbackRefused(f"the secret of this sink is no longer usable: {error}") from None
        token = read_token(key, text)
        if self._now() >= token.expires_at:
            raise NotDecided(_EXPIRED[kind])
        return token

    async def _find_status(self, token: ActionToken, post_id: str) -> ApprovalStatus:
        """Return the status of the token's event if the post is this sink's message about it."""
        status = await self._context.messages.find_status_of_shown_event(
            self._settings.name, post_id, token.event_id
        )
        if status is None:
            raise NotDecided(_EXPIRED["button"])
        return status

    async def _caller(self, user_id: str) -> Caller:
        """Return the caller for a person. The server is asked only about whom a rule names.

        Raises NotEligible, and Deferred if the server does not answer.
        """
        channel_id = self._settings.channel
        try:
            async with asyncio.timeout(LOOKUP_TIMEOUT):
                team_id = str((await self._api.find(f"channels/{channel_id}")).get("team_id"))
                if _TEAM_ID.fullmatch(team_id) is None:
                    raise NotEligible(
                        "Nobody can decide here: this channel belongs to no team, as direct "
                        "messages do not, and a vote names a team."
                    )
                principal = f"mattermost:{team_id}/{user_id}"
                caller = self._context.decisions.caller(principal, self._settings)
                if caller is None:
                    raise NotEligible(
                        "You are not among those who decide here: nothing was decided. "
                        f"Your principal is `{principal}`."
                    )
                user = await self._api.find(f"users/{user_id}")
                member = await self._api.find(f"channels/{channel_id}/members/{user_id}")
        except TimeoutError:
            raise Deferred(
                f"expected Mattermost to identify a person within {LOOKUP_TIMEOUT:g} s, "
                "it did not answer"
            ) from None
        problem = eligibility_problem(user, member, user_id=user_id, channel_id=channel_id)
        if problem is not None:
            raise NotEligible(f"{problem}: nothing was decided.")
        return caller

    def _now(self) -> int:
        return int(self._clock.now().timestamp())


def eligibility_problem(
    user: Mapping[str, Any], member: Mapping[str, Any], *, user_id: str, channel_id: str
) -> str | None:
    """Return why a person must not decide; None for an eligible person. Pure.

    A missing or unclear field of the server's ``user`` and channel ``member`` counts against the
    person, except for ``is_bot``, ``remote_id`` and ``scheme_guest``, which it may omit.
    """
    if user.get("id") != user_id or user.get("delete_at") != 0:
        return "Your account is not an active one of this server"
    if user.get("is_bot", False) is not False or user.get("remote_id"):
        return "Only people of this server can decide, no bots and nobody of another server"
    roles = user.get("roles")
    if not isinstance(roles, str) or "system_guest" in roles.split():
        return "Guests cannot decide"
    if member.get("user_id") != user_id or member.get("channel_id") != channel_id:
        return "You are not a member of this channel"
    channel_roles = str(member.get("roles")).split()
    if member.get("scheme_guest", False) is not False or "channel_guest" in channel_roles:
        return "Guests cannot decide"
    return None
