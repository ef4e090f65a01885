"""The section of a Teams sink, and which URLs are those of a workflow."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from pydantic import SecretStr, model_validator
from yarl import URL

from relay.chat import ChatSettings
from relay.net.egress import parse_receiver_url

_OF_MICROSOFT = re.compile(r"\.(logic\.azure|api\.powerplatform)\.(com|us|cn)$")
MAKE_ONE = "make one from “Send webhook alerts to a channel” in the Workflows app, and give the sink its URL"
"""What to do where there is no workflow any more."""


class Settings(ChatSettings):
    """A channel or chat of Microsoft Teams, through a workflow."""

    kind: Literal["teams"]
    url: SecretStr | None = None
    """The workflow's webhook URL. Whoever has it can post: it is treated as a secret."""
    url_file: Path | None = None
    """A file that holds it, instead of url."""
    allow_http: bool = False
    """Allow a URL with http, for tests."""

    @model_validator(mode="after")
    def _can_be_posted_to(self) -> Settings:
        if self.url is None and self.url_file is None:
            raise ValueError("expected url or url_file, got neither")
        try:
            self.target()
        except ValueError as error:
            raise ValueError(f"url{'_file' if self._files else ''}: {error}") from None
        return self

    def target(self) -> URL:
        """The workflow's URL as it is now, letter for letter. Raises ValueError if it cannot be used."""
        text = self.reveal("url") or ""
        url = parse_receiver_url(text, allow_http=self.allow_http)
        host = url.raw_host or ""
        if host.endswith(".webhook.office.com"):
            raise ValueError(
                f"expected the URL of a workflow, got that of a connector, which Microsoft has retired: {MAKE_ONE}"
            )
        if _OF_MICROSOFT.search(host) is not None and not url.query.get("sig"):
            raise ValueError(
                "expected a URL that ends in sig= and its signature: copy all of it, and let “Anyone” trigger the flow"
            )
        return URL(text, encoded=True)
