"""Posts cards through a workflow's webhook, and explains its errors with what to do about them.

Power Automate answers 202 when it has taken the request. What the workflow then does with it, no
caller learns. The URL is a secret: whoever has its ``sig`` can post.
"""

from __future__ import annotations

from collections.abc import Sequence

import aiohttp
import orjson

from relay.chat import MessageGone, raise_deferred_if_secret_unusable
from relay.chat.cards.card import Card, Text
from relay.chat.platforms.teams.card import Json, card_message, follow_up_message
from relay.chat.platforms.teams.settings import CREATE_WORKFLOW, Settings
from relay.clock import Clock
from relay.errors import Deferred
from relay.net.http import Request, Response, interpret_response, post

_TURNED_OFF = (
    "the workflow is turned off or was deleted: turn it on in the Workflows app, or "
    + CREATE_WORKFLOW
)
_WRONG_URL = (
    "the workflow refused the URL: copy all of it again, to the end of sig=, "
    "and let “Anyone” trigger the flow"
)
_NO_WORKFLOW = f"there is no such workflow: if it was deleted, {CREATE_WORKFLOW}"
_REMEDIES_BY_STATUS = {
    400: f"the workflow does not take Adaptive Cards: {CREATE_WORKFLOW}",
    401: _WRONG_URL,
    403: _WRONG_URL,
    404: _NO_WORKFLOW,
    410: f"the workflow was deleted: {CREATE_WORKFLOW}, then `imds-relay resume` this sink",
    413: "the message is too large for the workflow; please report this as a bug of the relay",
}
_REMEDIES_BY_CODE = {
    "WorkflowTriggerIsNotEnabled": _TURNED_OFF,  # with status 400
    "WorkflowNotFound": _NO_WORKFLOW,
    "DirectApiAuthorizationRequired": _WRONG_URL,
}
"""By ``error.code`` of the response, which is more precise than its status."""


class WorkflowWebhook:
    """Posts messages. Implements `relay.chat.live_message.ChatPlatform`, without editing."""

    def __init__(self, settings: Settings, clock: Clock, session: aiohttp.ClientSession) -> None:
        self._settings = settings
        self._clock = clock
        self._session = session

    async def post(self, card: Card) -> str | None:
        """Post a card and return None: the message has no reference. Raises Deferred."""
        await self._send(card_message(card))
        return None

    async def edit(self, ref: str, card: Card) -> None:  # noqa: ARG002  # nothing can be edited
        """Raise MessageGone: only a sink of another kind has made a reference."""
        raise MessageGone("the message was posted by a sink of another kind")

    async def reply_in_thread(self, ref: str | None, lines: Sequence[Text]) -> None:  # noqa: ARG002  # always None
        """Post a short card. Raises Deferred."""
        await self._send(follow_up_message(lines))

    async def _send(self, message: Json) -> None:
        with raise_deferred_if_secret_unusable("url"):
            url = self._settings.webhook_url()
        body = orjson.dumps(message)
        request = Request(
            url=url,
            headers={"Content-Type": "application/json"},
            body=body,
            # The workflow can repeat them in its answer.
            secrets=(url.query.get("sig", ""),),
        )
        response = await post(self._session, request, seconds=self._settings.timeout)
        outcome = interpret_response(response, self._clock.now())
        if isinstance(outcome, Deferred):
            raise _error_with_remedy(outcome, response)


def _error_with_remedy(error: Deferred, response: Response) -> Deferred:
    """Return the error with a remedy in its text, if there is one."""
    remedy = _REMEDIES_BY_CODE.get(_error_code(response)) or _REMEDIES_BY_STATUS.get(
        response.status
    )
    if remedy is None:
        return error
    return Deferred(
        f"expected 202 Accepted, got {response.status}: {remedy}",
        after=error.after,
        failure=error.failure,
        status=error.status,
        answer=error.response,
    )


def _error_code(response: Response) -> str:
    """Return ``error.code`` of an Azure Resource Manager error; an empty text without it."""
    try:
        code = orjson.loads(response.body)["error"]["code"]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return ""
    return code if isinstance(code, str) else ""
