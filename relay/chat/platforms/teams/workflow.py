"""Posts cards through a workflow, and says what its refusals mean."""

from __future__ import annotations

from collections.abc import Sequence

import aiohttp
import orjson
from yarl import URL

from relay.chat import MessageGone, embedded_secrets
from relay.chat.cards.card import Card, Text
from relay.chat.platforms.teams.card import Json, card_message, follow_up
from relay.chat.platforms.teams.settings import MAKE_ONE, Settings
from relay.clock import Clock
from relay.errors import Deferred
from relay.net.http import Request, Response, interpret_response, post

_OFF = "the workflow is turned off or was deleted: turn it on in the Workflows app, or " + MAKE_ONE
_NOT_OURS = "the workflow refused the URL: copy all of it again, to the end of sig=, and let “Anyone” trigger the flow"
_ADVICE = {
    400: "the workflow does not take Adaptive Cards: " + MAKE_ONE,
    401: _NOT_OURS,
    403: _NOT_OURS,
    404: "there is no such workflow: if it was deleted, " + MAKE_ONE,
    410: "the workflow was deleted: " + MAKE_ONE + ", then `imds-relay resume` this sink",
    413: "the message is too large for it; please report this as a mistake of the relay",
}
"""What mends a refusal, by its status."""
_CODES = {
    "WorkflowTriggerIsNotEnabled": _OFF,  # with 400
    "WorkflowNotFound": _ADVICE[404],
    "DirectApiAuthorizationRequired": _NOT_OURS,
}
"""The same by ``error.code``, which says more where there is one."""


class Workflow:
    """The platform: posts cards, and cannot edit."""

    def __init__(self, settings: Settings, clock: Clock, session: aiohttp.ClientSession) -> None:
        self._settings = settings
        self._clock = clock
        self._session = session

    async def post(self, card: Card) -> str | None:
        """Post a card. Raises Deferred."""
        await self._send(card_message(card))
        return None

    async def edit(self, ref: str, card: Card) -> None:  # noqa: ARG002  # nothing can be edited here
        """Raises MessageGone: a message that has a name was posted by a sink of another kind, which had this one's."""
        raise MessageGone("the message was posted elsewhere")

    async def reply_in_thread(self, ref: str | None, lines: Sequence[Text]) -> None:  # noqa: ARG002  # no message has a name
        """Post a short card. Raises Deferred."""
        await self._send(follow_up(lines))

    async def _send(self, message: Json) -> None:
        try:
            url = self._settings.target()
        except ValueError as error:
            raise Deferred(
                f"the url of this sink cannot be used any more: {error}", failure="slow"
            ) from None
        answer = await post(self._session, build(url, message), seconds=self._settings.timeout)
        outcome = interpret_response(answer, self._clock.now())
        if isinstance(outcome, Deferred):
            raise _in_words(outcome, answer)


def build(url: URL, message: Json) -> Request:
    """The request of one attempt. Pure."""
    signature, body = url.query.get("sig", ""), orjson.dumps(message)
    return Request(
        url,
        {"Content-Type": "application/json"},
        body,
        (*((signature,) if signature else ()), *embedded_secrets(body)),
    )


def _in_words(refused: Deferred, answer: Response) -> Deferred:
    """The same verdict with a remedy, where somebody must mend something."""
    advice = _CODES.get(_code(answer)) or _ADVICE.get(answer.status)
    if advice is None:
        return refused
    return Deferred(
        f"expected 202 Accepted, got {answer.status}: {advice}",
        after=refused.after,
        failure=refused.failure,
        status=refused.status,
        answer=refused.response,
    )


def _code(answer: Response) -> str:
    """``error.code`` of the answer (Azure Resource Manager's form of errors); empty where there is none."""
    try:
        code = orjson.loads(answer.body)["error"]["code"]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return ""
    return code if isinstance(code, str) else ""
