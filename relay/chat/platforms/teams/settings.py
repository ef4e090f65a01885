"""The configuration section of a Teams sink."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from pydantic import SecretStr, model_validator
from yarl import URL

from relay.chat import ChatSettings
from relay.net.egress import parse_receiver_url

CREATE_WORKFLOW = (
    "create a workflow from “Send webhook alerts to a channel” in the Workflows app, "
    "and configure its URL"
)
"""What to do if there is no usable workflow."""
_MICROSOFT_HOST = re.compile(r"\.(logic\.azure|api\.powerplatform)\.(com|us|cn)$")
_RETIRED_CONNECTOR_HOST = ".webhook.office.com"


class Settings(ChatSettings):
    """A channel or chat of Microsoft Teams, through a workflow."""

    kind: Literal["teams"]
    url: SecretStr | None = None
    """The workflow's webhook URL. It is a secret: whoever has it can post."""
    url_file: Path | None = None
    """A file that holds the URL, instead of url."""
    allow_http: bool = False
    """Allow a URL with http, for tests."""

    @model_validator(mode="after")
    def _check_values(self) -> Settings:
        if self.url is None and self.url_file is None:
            raise ValueError("expected url or url_file, got neither")
        self.run_field_checks({"url": self.webhook_url})
        return self

    def webhook_url(self) -> URL:
        """Return the workflow's current URL, unchanged: its parts are signed.

        Raises ValueError if the URL cannot be used.
        """
        text = self.reveal("url") or ""
        url = parse_receiver_url(text, allow_http=self.allow_http)
        host = url.raw_host or ""
        if host.endswith(_RETIRED_CONNECTOR_HOST):
            raise ValueError(
                "expected the URL of a workflow, got the URL of a connector, "
                f"which Microsoft has retired: {CREATE_WORKFLOW}"
            )
        if _MICROSOFT_HOST.search(host) is not None and not url.query.get("sig"):
            raise ValueError(
                "expected a URL that ends in sig= and its signature: "
                "copy all of it, and let “Anyone” trigger the flow"
            )
        return URL(text, encoded=True)
