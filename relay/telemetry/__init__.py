"""What the relay reports to its operator: the log, the metrics and the traces."""

from __future__ import annotations

from typing import Literal

from relay.settings import Section

LogForm = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]


class TelemetrySettings(Section):
    """How the relay reports to its operator."""

    log: LogForm = "text"
    """text for people, json for programs; both on standard error, one line for each record."""
    level: LogLevel = "info"
    """The least level that is logged: debug, info, warning or error."""
