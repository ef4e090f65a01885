"""The section of the configuration for a Slack channel, with what makes no sense refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field, SecretStr, model_validator
from yarl import URL

from relay.approvals.principals import PrincipalForm
from relay.chat import ChatSettings
from relay.net.egress import parse_receiver_url

_BOT = re.compile(r"xoxb-[A-Za-z0-9-]{8,255}")
_APP = re.compile(r"xapp-[A-Za-z0-9-]{8,255}")
_SECRET = re.compile(r"[!-~]{16,128}")


class Settings(ChatSettings):
    """A channel in Slack."""

    principals: ClassVar = PrincipalForm("slack", "<team>/<user>")

    kind: Literal["slack"]
    token: SecretStr | None = None
    """The app's bot token, xoxb-…, from “OAuth & Permissions” of the app."""
    token_file: Path | None = None
    """A file that holds it, instead of token."""
    channel: str = Field(pattern=r"^[CG][A-Z0-9]{2,24}$")
    """The id of the channel, such as C024BE91L: it stands at the bottom of the channel's details."""
    signing_secret: SecretStr | None = None
    """From “Basic Information” of the app: proves that Slack itself calls /v1/chat/<name>. Instead of app_token."""
    signing_secret_file: Path | None = None
    """A file that holds it, instead of signing_secret."""
    app_token: SecretStr | None = None
    """An app-level token, xapp-…, with connections:write: the relay then asks Slack for clicks (Socket Mode), and needs no open port."""
    app_token_file: Path | None = None
    """A file that holds it, instead of app_token."""
    approve_in_chat: bool = False
    """Decide by buttons in the chat itself, on Slack's word for who clicked; false: buttons are links to the page that confirms."""
    api_url: str = "https://slack.com/api/"
    """The Web API; another for GovSlack (https://slack-gov.com/api/) or a test."""
    allow_http: bool = False
    """Allow an api_url with http: for tests."""

    @model_validator(mode="after")
    def _can_be_used(self) -> Settings:
        if find_spec("slack_sdk") is None:
            raise ValueError(
                "expected the package imds-relay[slack], which speaks with Slack; it is not installed"
            )
        if self.token is None and self.token_file is None:
            raise ValueError("expected token or token_file, got neither")
        by_call, by_socket = self.accepts_callbacks, self.has_socket
        if by_call and by_socket:
            raise ValueError(
                "expected one of signing_secret (Slack calls the relay) and app_token (Socket Mode: the relay calls Slack), got both; "
                "an app in Socket Mode is never called"
            )
        if self.approve_in_chat and not (by_call or by_socket):
            raise ValueError(
                "approve_in_chat: expected signing_secret or app_token beside it, which prove who clicked, got neither"
            )
        checks: dict[str, Callable[[], object]] = {"token": self.bot_token, "api_url": self.base}
        if by_call:
            checks["signing_secret"] = self.secret
        if by_socket:
            checks["app_token"] = self.socket_token
        for name, check in checks.items():
            try:
                check()
            except ValueError as error:
                raise ValueError(
                    f"{name}{'_file' if name in self._files else ''}: {error}"
                ) from None
        return self

    @property
    def accepts_callbacks(self) -> bool:
        """Whether Slack calls ``/v1/chat/<name>``."""
        return self.signing_secret is not None or self.signing_secret_file is not None

    @property
    def has_socket(self) -> bool:
        """Whether clicks come over Socket Mode."""
        return self.app_token is not None or self.app_token_file is not None

    def base(self) -> URL:
        """The Web API's URL, with a slash at its end. Raises ValueError if it cannot be used."""
        url = parse_receiver_url(self.api_url, allow_http=self.allow_http)
        if url.query_string:
            raise ValueError(
                "expected a URL without a query, such as https://slack.com/api/, got one with it"
            )
        return url if url.path.endswith("/") else url.with_path(f"{url.path}/")

    def bot_token(self) -> str:
        """The bot token as it is now. Raises ValueError if it cannot be one."""
        return self._checked("token", _BOT, "a bot token, which starts with xoxb-")

    def socket_token(self) -> str:
        """The app-level token as it is now. Raises ValueError if it cannot be one."""
        return self._checked("app_token", _APP, "an app-level token, which starts with xapp-")

    def secret(self) -> bytes:
        """The signing secret as it is now. Raises ValueError if it cannot be one."""
        return self._checked(
            "signing_secret", _SECRET, "the app's signing secret, 32 hexadecimal digits"
        ).encode()

    def _checked(self, name: str, pattern: re.Pattern[str], expected: str) -> str:
        text = self.reveal(name) or ""
        if pattern.fullmatch(text) is None:
            raise ValueError(f"expected {expected}, got something else")
        return text
