"""What the relay reports to its operator: the log, the metrics and the traces.

`log` sets up the log of the process. `event_log` writes a line for each event that the store
recorded, which `lines` makes. `metrics` defines the metrics and hands their values to the
Prometheus client, and `event_counts` counts recorded events for them. `traces` makes spans of
recorded events, and `otlp` sends them to a collector. This module has the section ``telemetry`` of
the configuration.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from pydantic import Field, SecretStr, model_validator
from yarl import URL

from relay.net.egress import parse_receiver_url
from relay.net.tls import ClientTlsSettings
from relay.settings import Duration, Section

LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]
TRACES_PATH = "/v1/traces"
"""Where collectors take traces, by the OTLP specification."""
_HEADER_NAME = re.compile(r"[A-Za-z0-9-]+")
_PACKAGES = (
    "opentelemetry.sdk.trace",
    "opentelemetry.exporter.otlp.proto.common.trace_encoder",
)


class TracesSettings(Section):
    """A collector of OpenTelemetry traces, over OTLP/HTTP."""

    url: SecretStr | None = None
    """The collector; without a path, /v1/traces. It can hold a token, so it is a secret."""
    url_file: Path | None = None
    """A file that holds the URL, instead of url."""
    allow_http: bool = False
    """Allow a URL with http: spans are then readable on the way."""
    headers: Mapping[str, SecretStr] = Field(default_factory=dict)
    """Sent with every request, such as an API key; their values are treated as secrets."""
    headers_file: Path | None = None
    """A file that holds them, one `Name: value` a line, instead of headers."""
    timeout: Duration = Field(default=10.0, gt=0)
    """For one request to the collector."""
    tls: ClientTlsSettings | None = None
    """Certificates for the collector."""

    @model_validator(mode="after")
    def _check_values(self) -> TracesSettings:
        if self.url is None and self.url_file is None:
            raise ValueError("expected url or url_file, got neither")
        self.run_field_checks({"url": self.collector_url, "headers": self.extra_headers})
        if not all(map(_is_installed, _PACKAGES)):
            raise ValueError(
                "expected the packages of the extra otel (OpenTelemetry), they are not installed: "
                "pip install --require-hashes -r requirements/run.lock"
            )
        return self

    def collector_url(self) -> URL:
        """Return the current URL of the collector. Raises ValueError if it is unusable."""
        url = parse_receiver_url(self.reveal("url") or "", allow_http=self.allow_http)
        return url if url.raw_path != "/" else url.with_path(TRACES_PATH)

    def extra_headers(self) -> dict[str, str]:
        """Return the current headers. Raises ValueError if one is unusable."""
        if "headers" in self._files:
            lines = [line.partition(":") for line in self.reveal_file_lines("headers")]
            headers = {name.strip(): value.strip() for name, _, value in lines}
        else:
            headers = {name: value.get_secret_value() for name, value in self.headers.items()}
        for name, value in headers.items():
            if _HEADER_NAME.fullmatch(name) is None:
                raise ValueError(
                    "expected names of letters, digits and hyphens, got something else"
                )
            if not (value.isascii() and value.isprintable()):
                raise ValueError(
                    f"expected printable ASCII characters as the value of {name}, "
                    "got something else"
                )
        return headers


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # a package around it is missing
        return False


class TelemetrySettings(Section):
    """How the relay reports to its operator."""

    log: LogFormat = "text"
    """text for people, json for programs; both on standard error, one line for each record."""
    level: LogLevel = "info"
    """The least level that is logged: debug, info, warning or error."""
    traces: TracesSettings | None = None
    """Where traces go; null: tracing is off. Needs the packages of the extra otel."""
