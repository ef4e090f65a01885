"""The configuration section of a Slack channel."""

from __future__ import annotations

import re
from importlib.util import find_spec
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
_SIGNING_SECRET = re.compile(r"[!-~]{16,128}")


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
    signing_secret: SecretStr | None = None
    """The app's signing secret, from “Basic Information” of the app. It proves that Slack calls
    /v1/chat/<name>. Instead of app_token."""
    signing_secret_file: Path | None = None
    """A file that holds the signing secret, instead of signing_secret."""
    app_token: SecretStr | None = None
    """An app-level token, xapp-…, with connections:write. With it the relay connects to Slack for
    clicks (Socket Mode) and needs no open port."""
    app_token_file: Path | None = None
    """A file that holds the app-level token, instead of app_token."""
    approve_in_chat: bool = False
    """Take decisions from buttons in the chat and trust Slack's word for who clicked. With false,
    buttons are links to the confirm page."""
    api_url: str = "https://slack.com/api/"
    """The Web API. Another URL for GovSlack (https://slack-gov.com/api/) or a test."""
    allow_http: bool = False
    """Allow an api_url with http, for tests."""

    @model_validator(mode="after")
    def _check_values(self) -> Settings:
        if find_spec("slack_sdk") is None:
            raise ValueError(
                "expected the package slack-sdk, which this kind of sink needs, "
                "it is not installed: requirements/run.lock has it"
            )
        if self.token is None and self.token_file is None:
            raise ValueError("expected token or token_file, got neither")
        if self.uses_http_callbacks and self.uses_socket_mode:
            raise ValueError(
                "expected one of signing_secret (Slack calls the relay) and app_token (Socket "
                "Mode: the relay calls Slack), got both; Slack never calls an app in Socket Mode"
            )
        if self.approve_in_chat and not self.has_interactions:
            raise ValueError(
                "approve_in_chat: expected signing_secret or app_token beside it, "
                "which prove who clicked, got neither"
            )
        self.run_field_checks({"token": self.bot_token, "api_url": self.web_api_base_url})
        if self.uses_http_callbacks:
            self.run_field_checks({"signing_secret": self.current_signing_secret})
        if self.uses_socket_mode:
            self.run_field_checks({"app_token": self.app_level_token})
        return self

    @property
    def uses_http_callbacks(self) -> bool:
        """Whether Slack calls ``/v1/chat/<name>``."""
        return self.signing_secret is not None or self.signing_secret_file is not None

    @property
    def uses_socket_mode(self) -> bool:
        """Whether clicks and commands come over Socket Mode."""
        return self.app_token is not None or self.app_token_file is not None

    @property
    def has_interactions(self) -> bool:
        """Whether clicks and commands reach the relay at all."""
        return self.uses_http_callbacks or self.uses_socket_mode

    def web_api_base_url(self) -> URL:
        """Return the Web API's URL with a slash at its end. Raises ValueError if it is wrong."""
        url = parse_receiver_url(self.api_url, allow_http=self.allow_http)
        if url.query_string:
            raise ValueError(
                "expected a URL without a query, such as https://slack.com/api/, got one with it"
            )
        return url if url.path.endswith("/") else url.with_path(f"{url.path}/")

    def bot_token(self) -> str:
        """Return the current bot token. Raises ValueError if it is malformed."""
        return self._current_secret("token", _BOT_TOKEN, "a bot token, which starts with xoxb-")

    def app_level_token(self) -> str:
        """Return the current app-level token. Raises ValueError if it is malformed."""
        expected = "an app-level token, which starts with xapp-"
        return self._current_secret("app_token", _APP_TOKEN, expected)

    def current_signing_secret(self) -> bytes:
        """Return the current signing secret. Raises ValueError if it is malformed."""
        expected = "the app's signing secret, 32 hexadecimal digits"
        return self._current_secret("signing_secret", _SIGNING_SECRET, expected).encode()

    def _current_secret(self, name: str, pattern: re.Pattern[str], expected: str) -> str:
        secret = self.reveal(name) or ""
        if pattern.fullmatch(secret) is None:
            raise ValueError(f"expected {expected}, got something else")
        return secret
