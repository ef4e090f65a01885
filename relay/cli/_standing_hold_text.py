"""Describes standing holds of the HTTP API in words, for several verbs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from relay.cli._output import format_local_time


def describe_holds_in_force(holds: Iterable[Mapping[str, Any]]) -> str | None:
    """Return whose standing holds keep an event from starting, and until when; None: nobody's."""
    texts = [
        f"standing hold {hold['holdId'][:8]} of {hold['principal']} until "
        f"{format_local_time(hold['until'])} ({hold['reason']})"
        for hold in holds
    ]
    return "; ".join(texts) or None
