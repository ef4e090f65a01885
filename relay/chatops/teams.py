"""Teams: a card for each event through a Workflows webhook, follow-ups where others edit, links to the page where people answer.

Workflows ("Send webhook alerts to a channel", the trigger "When a Teams webhook request is received") take cards and give nothing
back: no name of the message, so nothing can be edited, and no click but ``Action.OpenUrl``. Sources: see `_teams_card`, and
https://learn.microsoft.com/azure/logic-apps/logic-apps-workflow-definition-language (the trigger is that of Logic Apps).
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

import aiohttp
import orjson
from pydantic import SecretStr, model_validator
from yarl import URL

from relay.chatops import ChatRefused, ChatSettings, Reply
from relay.chatops._current import Current
from relay.chatops._teams_card import Json, follow_up, message_of
from relay.clock import Clock
from relay.egress import parse_url
from relay.errors import Deferred
from relay.findings import Finding
from relay.notices.board import Board
from relay.notices.card import Card, Text
from relay.sinks._http import Answer, Request, open_session, post, verdict
from relay.sinks._reach import reach

_OF_MICROSOFT = re.compile(r"\.(logic\.azure|api\.powerplatform)\.(com|us|cn)$")
_AGAIN = "make one from “Send webhook alerts to a channel” in the Workflows app, and give the sink its URL"
_OFF = "the workflow is turned off or was deleted: turn it on in the Workflows app, or " + _AGAIN
_NOT_OURS = "the workflow refused the URL: copy all of it again, to the end of sig=, and let “Anyone” trigger the flow"
_ADVICE = {
    400: "the workflow does not take Adaptive Cards: " + _AGAIN,
    401: _NOT_OURS,
    403: _NOT_OURS,
    404: "there is no such workflow: if it was deleted, " + _AGAIN,
    410: "the workflow was deleted: " + _AGAIN + ", then `imds-relay resume` this sink",
    413: "the message is too large for it; please report this as a mistake of the relay",
}
"""What mends a refusal, by its status."""
_CODES = {
    "WorkflowTriggerIsNotEnabled": _OFF,  # with 400
    "WorkflowNotFound": _ADVICE[404],
    "DirectApiAuthorizationRequired": _NOT_OURS,
}
"""The same by ``error.code``, which says more where there is one."""


class Settings(ChatSettings):
    """A channel or chat of Microsoft Teams, through a workflow."""

    kind: Literal["teams"]
    url: SecretStr | None = None
    """The workflow's webhook URL. Whoever has it can post: it is treated as a secret."""
    url_file: Path | None = None
    """A file that holds it, instead of url."""
    allow_http: bool = False
    """Allow a URL with http, for tests."""

    @model_validator(mode="after")
    def _can_be_posted_to(self) -> Settings:
        if self.url is None and self.url_file is None:
            raise ValueError("expected url or url_file, got neither")
        try:
            self.target()
        except ValueError as error:
            raise ValueError(f"url{'_file' if self._files else ''}: {error}") from None
        return self

    def target(self) -> URL:
        """The workflow's URL as it is now, letter for letter. Raises ValueError if it cannot be used."""
        text = self.reveal("url") or ""
        url = parse_url(text, allow_http=self.allow_http)
        host = url.raw_host or ""
        if host.endswith(".webhook.office.com"):
            raise ValueError(f"expected the URL of a workflow, got that of a connector, which Microsoft has retired: {_AGAIN}")
        if _OF_MICROSOFT.search(host) is not None and not url.query.get("sig"):
            raise ValueError("expected a URL that ends in sig= and its signature: copy all of it, and let “Anyone” trigger the flow")
        return URL(text, encoded=True)


class Workflow:
    """The platform: posts cards, and cannot edit."""

    def __init__(self, settings: Settings, clock: Clock, session: aiohttp.ClientSession) -> None:
        self._settings = settings
        self._clock = clock
        self._session = session

    async def post(self, card: Card) -> str | None:
        """Post a card. Raises Deferred."""
        await self._send(message_of(card))
        return None

    async def edit(self, ref: str, card: Card) -> None:
        """Never called: no message has a name."""
        raise NotImplementedError

    async def tell(self, ref: str | None, lines: Sequence[Text]) -> None:  # noqa: ARG002  # no message has a name
        """Post a short card. Raises Deferred."""
        await self._send(follow_up(lines))

    async def _send(self, message: Json) -> None:
        try:
            url = self._settings.target()
        except ValueError as error:
            raise Deferred(f"the url of this sink cannot be used any more: {error}", failure="slow") from None
        answer = await post(self._session, build(url, message), seconds=self._settings.timeout)
        outcome = verdict(answer, self._clock.now())
        if isinstance(outcome, Deferred):
            raise _in_words(outcome, answer)


def build(url: URL, message: Json) -> Request:
    """The request of one attempt. Pure."""
    signature = url.query.get("sig", "")
    return Request(url, {"Content-Type": "application/json"}, orjson.dumps(message), (signature,) if signature else ())


def _in_words(refused: Deferred, answer: Answer) -> Deferred:
    """The same verdict with a remedy, where somebody must mend something."""
    advice = _CODES.get(_code(answer)) or _ADVICE.get(answer.status)
    if advice is None:
        return refused
    return Deferred(
        f"expected 202 Accepted, got {answer.status}: {advice}",
        after=refused.after,
        failure=refused.failure,
        status=refused.status,
        answer=refused.answer,
    )


def _code(answer: Answer) -> str:
    """``error.code`` of the answer (Azure Resource Manager's form of errors); empty where there is none."""
    try:
        code = orjson.loads(answer.body)["error"]["code"]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return ""
    return code if isinstance(code, str) else ""


class Teams(Current):
    """A channel of Teams."""

    async def hear(self, headers: Mapping[str, str], body: bytes) -> Reply:  # noqa: ARG002  # whatever they are
        """Refuse: a workflow never calls. Raises ChatRefused."""
        raise ChatRefused("a workflow of Teams never calls: people answer on the page behind the links")


@asynccontextmanager
async def connect(settings: Settings, clock: Clock, board: Board) -> AsyncIterator[Teams]:
    """Open the sink's own session; nothing is connected until the first event."""
    async with open_session() as session:
        teams = Teams(settings, board, Workflow(settings, clock, session), clock)
        async with teams.kept():
            yield teams


async def examine(settings: Settings, clock: Clock, scope: str) -> list[Finding]:  # noqa: ARG001  # the contract of the family
    """Whether Microsoft's door is reached. Nothing is posted."""
    return [await reach(f"sink {settings.name}", settings.target(), tls=None, now=clock.now())]
