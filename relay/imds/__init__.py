"""WHERE IT COMES FROM: Azure's metadata service on this VM, read by poll, and the one way to a StartRequest.

``client`` makes calls and keeps their pace, ``discovery`` learns which VM this is, ``poller`` reads on for ever. Nothing
above this room knows the service's URLs, statuses or JSON.
"""

from __future__ import annotations

from typing import Annotated
from urllib.parse import SplitResult, urlsplit

from pydantic import AfterValidator, Field

from relay.settings import Duration, Section


def _origin(text: str) -> str:
    # What came is not quoted: it may hold a password.
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        parts, port = SplitResult("", "", "", "", ""), None
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise ValueError("expected http:// or https:// and a host, such as http://169.254.169.254")
    if parts.username is not None or parts.password is not None:
        raise ValueError("expected a URL without user and password")
    if parts.path.strip("/") or parts.query or parts.fragment:
        raise ValueError(
            "expected a URL without path, query or fragment: the relay adds /metadata/… itself"
        )
    return f"{parts.scheme}://{parts.netloc}"


def _not_too_often(seconds: float) -> float:
    if seconds < 0.5:
        raise ValueError(
            "expected 500ms or more: Azure allows a VM five calls a second, shared with all that poll there"
        )
    return seconds


def _some_time(seconds: float) -> float:
    if seconds <= 0:
        raise ValueError("expected more than 0s")
    return seconds


_Wait = Annotated[Duration, AfterValidator(_some_time)]


class SourceSettings(Section):
    """Where scheduled events are read, and how often."""

    url: Annotated[str, AfterValidator(_origin)] = "http://169.254.169.254"
    """The metadata service; another one only for tests and simulators."""
    api_version: str = Field(default="2020-07-01", pattern=r"^\d{4}-\d{2}-\d{2}$")
    """Version of the Scheduled Events API; 2020-07-01 is the newest."""
    interval: Annotated[Duration, AfterValidator(_not_too_often)] = 1.0
    """Time from one poll to the next."""
    timeout: _Wait = 10.0
    """How long one call may take, the body of its answer included."""
    first_timeout: _Wait = 130.0
    """The same until the first answer: Azure switches the service on then, which may take two minutes."""
