"""What the relay reports to its operator: the log, and counts for the metrics.

`log` sets up the log of the process. `lines` writes a line for each event that the store recorded,
and counts them (`relay.api.metrics`). This module has the section ``telemetry``.
"""

from __future__ import annotations

from typing import Literal

from relay.settings import Section

LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]


class TelemetrySettings(Section):
    """How the relay reports to its operator."""

    log: LogFormat = "text"
    """text for people, json for programs; both on standard error, one line for each record."""
    level: LogLevel = "info"
    """The least level that is logged: debug, info, warning or error."""
