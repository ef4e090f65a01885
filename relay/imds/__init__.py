"""Azure's metadata service on this VM (IMDS): the source of events and the way to start them.

No other package knows the URLs, the statuses or the JSON of the service. This module has the
section ``source`` of the configuration.
"""

from __future__ import annotations

from typing import Annotated
from urllib.parse import SplitResult, urlsplit

from pydantic import AfterValidator, Field

from relay.settings import Duration, Section, text_pattern_validator

DISCOVER = "discover"
"""In place of a URL: find the service (docs/protocol.md#without-a-virtual-network)."""


def _check_origin(text: str) -> str:
    if text == DISCOVER:
        return text
    # The error does not quote the text: it may hold a password.
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        parts, port = SplitResult("", "", "", "", ""), None
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise ValueError(
            "expected http:// or https:// and a host, such as http://169.254.169.254, or discover"
        )
    if parts.username is not None or parts.password is not None:
        raise ValueError("expected a URL without user and password")
    if parts.path.strip("/") or parts.query or parts.fragment:
        raise ValueError(
            "expected a URL without path, query or fragment: the relay adds /metadata/… itself"
        )
    return f"{parts.scheme}://{parts.netloc}"


def _check_interval(seconds: float) -> float:
    # docs/protocol.md#five-calls-a-second
    if seconds < 0.5:
        raise ValueError(
            "expected 500ms or more: Azure allows five calls a second for each VM, "
            "shared by all programs that poll there"
        )
    return seconds


class SourceSettings(Section):
    """Where scheduled events are read, and how often."""

    url: Annotated[str, AfterValidator(_check_origin)] = "http://169.254.169.254"
    """The metadata service; discover: find it, for VMs without a virtual network."""
    api_version: Annotated[
        str,
        text_pattern_validator(
            r"[0-9]{4}-[0-9]{2}-[0-9]{2}", 'an api-version such as "2020-07-01"'
        ),
    ] = "2020-07-01"
    """Version of the Scheduled Events API, 2017-03-01 to 2020-07-01; the newest knows most."""
    interval: Annotated[Duration, AfterValidator(_check_interval)] = 1.0
    """Time from one poll to the next."""
    timeout: Duration = Field(default=10.0, gt=0)
    """How long one call may take, the body of its answer included."""
    first_timeout: Duration = Field(default=130.0, gt=0)
    """The same for the first call: it switches the service on, which may take two minutes."""
