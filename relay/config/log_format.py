"""Finds out whether the relay logs JSON or text, even if the configuration cannot be used.

``imds-relay run`` calls it before it loads the configuration, so that errors in the configuration
are logged in the form that the operator asked for. Of a document that is no YAML, a search for
``telemetry`` and ``log`` guesses the form.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from relay.config.document import read_document
from relay.config.file_lookup import find_file
from relay.errors import ConfigError
from relay.telemetry import LogFormat

_FLOW_LOG_FORM = re.compile(
    r"\btelemetry[\"']?\s*:\s*\{(?:[^{}]*[\s,])?[\"']?log[\"']?\s*:\s*[\"']?(json|text)\b"
)
"""``log`` in a section ``telemetry`` in braces."""
_LOG_FORM = re.compile(r"(?:^|[\s{,])[\"']?log[\"']?\s*:\s*[\"']?(json|text)\b")
"""``log`` in a line of a section ``telemetry`` that is indented."""


def find_log_format(
    path: Path | None = None, environment: Mapping[str, str] = os.environ
) -> LogFormat:
    """Return ``telemetry.log``, or text if that cannot be read. Raises no ConfigError."""
    form = environment.get("IMDS_RELAY_TELEMETRY__LOG")
    file = find_file(path, environment)
    if form is None and file is not None:
        try:
            telemetry = read_document(file).get("telemetry")
            form = telemetry.get("log") if isinstance(telemetry, dict) else None
        except ConfigError:
            form = _guess_log_format_of_invalid_yaml(file)
    return "json" if form == "json" else "text"


def _guess_log_format_of_invalid_yaml(file: Path) -> str | None:
    """Return what a document that is no YAML seems to say about the log."""
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    match = _FLOW_LOG_FORM.search(text)
    if match is not None:
        return match[1]
    is_inside = False
    for line in text.splitlines():
        if line and not line[0].isspace() and not line.startswith("#"):
            is_inside = line.lstrip("\"'").startswith("telemetry")
        match = _LOG_FORM.search(line)
        if is_inside and match is not None:
            return match[1]
    return None
