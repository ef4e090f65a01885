"""The fields of log lines: what a line says, for programs and for searches.

Whoever logs passes ``extra=log_extra(…)``. The formatters of `relay.telemetry.log` read it. A field
has the same name and meaning in every line, and one that is None is left out: see docs/log.md.
"""

from __future__ import annotations

from typing import Any


def log_extra(**fields: object) -> dict[str, Any]:
    """Return the ``extra`` of a logger's call: ``_log.info("…", extra=log_extra(count=2))``."""
    return {"fields": fields}
