"""WHERE PEOPLE ANSWER: sinks that show each event in one message, kept current, and that can be answered.

Each module of this folder that does not start with ``_`` is one member of the family. It defines

- ``Settings``: a subclass of `ChatSettings` whose ``kind`` is a literal; it is the member's section of the YAML document,
  an entry of ``sinks`` like any other;
- ``connect(settings, clock, board)``: an async context manager that yields a `ChatSink`, which is a sink (`relay.sinks`) that
  the dispatcher delivers to, and which takes the platform's own calls.

A member builds its `relay.chat.live_message.LiveMessageSink` around a `Platform`: that one decides what is posted, edited and told,
once, for all of them; the platform says how. The words are those of `relay.chat.cards.rendering`, the same everywhere. What a
person answers goes to the board, and from there to the gate, like an approval over HTTP.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from pydantic import Field

from relay.errors import RelayError
from relay.settings import Duration
from relay.sinks import Sink, SinkSettings

_CARRIED = re.compile(rb'/approve#([\w-]+)|this code: \*\*(\d+)\*\*|"(?:proof|state)":"([^"]+)"')


def embedded_secrets(body: bytes) -> tuple[str, ...]:
    """What a message carries that opens something: no log may hold it, though the platform repeats the message to us."""
    return tuple(text.decode() for found in _CARRIED.findall(body) for text in found if text)


class ChatSettings(SinkSettings):
    """What every chat sink has in the YAML document."""

    stale: Literal["deliver", "drop"] = "drop"
    """drop: a person wants the latest state; what it replaced is told in the thread."""
    timeout: Duration = Field(default=10.0, gt=0)
    """For one call of the platform."""
    give_up_after: Duration = Field(default=86400.0, gt=0)
    """How long a message is tried before it becomes a dead letter; a day or more yields to a NotBefore that is farther."""

    @property
    def needs_public_url(self) -> bool:
        """Whether messages name ``<api.public_url>/v1/chat/<name>`` as what the platform is to call; then there must be one."""
        return False


class CallbackRefused(RelayError):
    """A call that proves nothing, or that cannot be read. ``status`` is what it is answered with over HTTP.

    The text is for our log: the caller is told no more than the status.
    """

    def __init__(self, reason: str, *, status: Literal[400, 401] = 401) -> None:
        super().__init__(reason)
        self.status = status


class MessageGone(RelayError):
    """The message that was to be edited is not there any more: somebody has deleted it."""


@dataclass(frozen=True, slots=True)
class CallbackReply:
    """What the platform's call is answered with: 200, and this body. ``None`` is an empty body."""

    body: Mapping[str, object] | None = None


class ChatSink(Sink, Protocol):
    """A sink that can be answered."""

    async def handle_callback(self, headers: Mapping[str, str], body: bytes) -> CallbackReply:
        """Take a call of the platform; its decision is on disk when this returns.

        Names of headers are looked up without case. Raises ChatRefused for what proves nothing (401) or cannot be read
        (400); nothing has happened then. Of a platform that never calls, every call is refused.
        """
