"""What the relay reports to its operator: the log and the metrics."""

from __future__ import annotations

from typing import Literal

from relay.settings import Section


class TelemetrySettings(Section):
    """How the relay reports to its operator."""

    log: Literal["text", "json"] = "text"
    """text for people, json for programs; both on standard error, one line for each record."""
