"""The contract of the chat platforms: sinks that keep one message per event and take answers.

Each module of `relay.chat.platforms` that does not start with ``_``, and each entry point of the
group ``relay.chat.platforms``, is one platform (`relay.config` loads them, docs/adding-a-sink.md
shows how to write one). The module defines

- ``Settings``: a subclass of `ChatSettings` that narrows ``kind`` to a literal. It is the
  platform's section of the YAML document, an entry of ``sinks`` like any other. It is a subclass
  of `AnswerableChatSettings` if people can decide there.
- ``connect(settings, clock, context)``: an async context manager that yields a `ChatSink`. The
  `relay.chat.context.ChatContext` gives the platform everything that it may use of the relay.
- ``diagnose(settings, clock, scope)``, optional, as for every sink (`relay.sinks`).

``connect`` builds a `relay.chat.live_message.LiveMessageSink`, which decides what is posted, edited
and replied, around a `relay.chat.live_message.ChatPlatform`, which knows how.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import ClassVar, Literal, Protocol

from pydantic import Field

from relay.approvals.principals import PrincipalForm
from relay.errors import Deferred, RelayError
from relay.settings import Duration
from relay.sinks import Sink, SinkSettings


@contextmanager
def raise_deferred_if_secret_unusable(name: str, verb: str = "is") -> Iterator[None]:
    """Raise Deferred in place of the ValueError of a secret that somebody replaced in its file."""
    try:
        yield
    except ValueError as error:
        raise Deferred(f"the {name} of this sink {verb} no longer usable: {error}") from None


class ChatSettings(SinkSettings):
    """What every chat sink has in the YAML document."""

    principals: ClassVar[PrincipalForm | None] = None
    """The form of the principals that the platform vouches for; None if nobody answers in it."""

    stale: Literal["deliver", "drop"] = "drop"
    """drop: a person wants the latest state; the thread tells what it replaced."""
    timeout: Duration = Field(default=10.0, gt=0)
    """For one call of the platform."""
    give_up_after: Duration = Field(default=86400.0, gt=0)
    """How long a message is tried. A day or more is prolonged to a NotBefore that is later."""

    def current_secret(self, field: str, form: str, expected: str) -> str:
        """Return the current secret of a field. Raises ValueError if it has not this form."""
        secret = self.reveal(field)
        if not secret:
            raise ValueError(f"expected {expected}, in {field} or {field}_file, got neither")
        if re.fullmatch(form, secret) is None:
            raise ValueError(f"expected {expected}, got something else")
        return secret

    @property
    def needs_public_url(self) -> bool:
        """Whether the platform calls ``<api.public_url>/v1/chat/<name>``, which must be set."""
        return False


class AnswerableChatSettings(ChatSettings):
    """What every chat sink has in which people can decide. It declares their ``principals``."""

    can: tuple[Literal["read", "approve", "hold"], ...] = ("read", "approve", "hold")
    """What people may do here, at most: read, approve, hold."""
    resources: tuple[str, ...] | None = Field(default=None, min_length=1)
    """Patterns. People may decide here about an event if every resource of it matches a pattern."""


class CallbackRefused(RelayError):
    """A call that proves nothing or cannot be read. ``status`` is its HTTP answer.

    The reason is for our log: the caller learns the status only.
    """

    def __init__(self, reason: str, *, status: Literal[400, 401] = 401) -> None:
        super().__init__(reason)
        self.status = status


class MessageGone(RelayError):
    """The message to edit no longer exists: somebody deleted it."""


Reply = Mapping[str, object] | None
"""The body of the answer 200 to a platform's call; None is an empty body."""


class ChatSink(Sink, Protocol):
    async def handle_callback(self, headers: Mapping[str, str], body: bytes) -> Reply:
        """Handle a call of the platform; its decision is on disk when this returns.

        Header names are looked up without case. Raises CallbackRefused if the call proves nothing
        (401) or cannot be read (400); it then has no effect. A platform that never calls refuses
        every call.
        """
