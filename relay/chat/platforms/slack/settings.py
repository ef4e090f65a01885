"""The configuration section of a Slack channel."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import SecretStr, model_validator
from yarl import URL

from relay.approvals.principals import PrincipalForm
from relay.chat import AnswerableChatSettings
from relay.net.egress import parse_receiver_url
from relay.settings import text_pattern_validator

_BOT_TOKEN = re.compile(r"xoxb-[A-Za-z0-9-]{8,255}")
_APP_TOKEN = re.compile(r"xapp-[A-Za-z0-9-]{8,255}")


class Settings(AnswerableChatSettings):
    """A channel in Slack."""

    principals: ClassVar = PrincipalForm(
        "slack", "<team>/<user>", r"[TE][A-Z0-9]{1,31}/[UW][A-Z0-9]{1,31}"
    )

    kind: Literal["slack"]
    token: SecretStr | None = None
    """The app's bot token, xoxb-…, from “OAuth & Permissions” of the app."""
    token_file: Path | None = None
    """A file that holds the token, instead of token."""
    channel: Annotated[
        str,
        text_pattern_validator(
            r"[CG][A-Z0-9]{2,24}", "the id of a channel such as C024BE91L, not its name"
        ),
    ]
    """The id of the channel, such as C024BE91L, from the bottom of the channel's details."""
    app_token: SecretStr | None = None
    """An app-level token, xapp-…, with connections:write. With it the relay connects to Slack for
    clicks and commands (Socket Mode). No port need be open."""
    app_token_file: Path | None = None
    """A file that holds the app-level token, instead of app_token."""
    approve_in_chat: bool = False
    """Take decisions from buttons in the chat and trust Slack's word for who clicked. With false,
    buttons are links to the page."""
    api_url: str = "https://slack.com/api/"
    """The Web API. Another URL for GovSlack (https://slack-gov.com/api/) or a test."""
    allow_http: bool = False
    """Allow an api_url with http, for tests."""

    @model_validator(mode="after")
    def _check_values(self) -> Settings:
        if self.token is None and self.token_file is None:
            raise ValueError("expected token or token_file, got neither")
        if self.approve_in_chat and not self.uses_socket_mode:
            raise ValueError(
                "approve_in_chat: expected app_token or app_token_file beside it, over which "
                "clicks arrive, got neither"
            )
        self.run_field_checks({"token": self.bot_token, "api_url": self.web_api_url})
        if self.uses_socket_mode:
            self.run_field_checks({"app_token": self.app_level_token})
        return self

    @property
    def uses_socket_mode(self) -> bool:
        """Whether clicks and commands come over Socket Mode."""
        return self.app_token is not None or self.app_token_file is not None

    def web_api_url(self) -> URL:
        """Return the Web API's URL. Raises ValueError if it is wrong."""
        url = parse_receiver_url(self.api_url, allow_http=self.allow_http)
        if url.query_string:
            raise ValueError(
                "expected a URL without a query, such as https://slack.com/api/, got one with it"
            )
        return url

    def bot_token(self) -> str:
        """Return the current bot token. Raises ValueError if it is malformed."""
        return self._current_secret("token", _BOT_TOKEN, "a bot token, which starts with xoxb-")

    def app_level_token(self) -> str:
        """Return the current app-level token. Raises ValueError if it is malformed."""
        expected = "an app-level token, which starts with xapp-"
        return self._current_secret("app_token", _APP_TOKEN, expected)

    def _current_secret(self, name: str, pattern: re.Pattern[str], expected: str) -> str:
        secret = self.reveal(name) or ""
        if pattern.fullmatch(secret) is None:
            raise ValueError(f"expected {expected}, got something else")
        return secret
