"""The section of the configuration for a Mattermost channel, with what makes no sense refused."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field, SecretStr, model_validator
from typing_extensions import override
from yarl import URL

from relay import signature
from relay.approvals.principals import PrincipalForm
from relay.chat import ChatSettings
from relay.net.egress import parse_receiver_url


class Settings(ChatSettings):
    """A channel of a Mattermost server, and the bot that posts there."""

    principals: ClassVar = PrincipalForm("mattermost", "<team>/<user>")

    kind: Literal["mattermost"]
    api_url: str
    """The server's own address, such as https://chat.example.com."""
    channel: str = Field(pattern=r"^[a-z0-9]{26}$")
    """The id of the channel, in its menu under View Info. The bot must be a member."""
    token: SecretStr | None = None
    """The bot account's access token."""
    token_file: Path | None = None
    """A file that holds it, instead of token."""
    approve_in_chat: bool = False
    """Buttons that decide in the chat itself, after a dialog. false: links to the page on which a decision is confirmed."""
    secret: SecretStr | None = None
    """whsec_ and 24 to 64 random bytes in base64, known to this relay alone: it seals what a button carries. Needed by approve_in_chat."""
    secret_file: Path | None = None
    """A file that holds it, instead of secret."""
    allow_http: bool = False
    """Allow an api_url with http: token and messages are then readable on the way."""

    @model_validator(mode="after")
    def _can_be_used(self) -> Settings:
        checks = {
            "api_url": self.base,
            "token": self.bearer,
            **({"secret": self.key} if self.approve_in_chat else {}),
        }
        for name, check in checks.items():
            try:
                check()
            except ValueError as error:
                raise ValueError(
                    f"{name}{'_file' if name in self._files else ''}: {error}"
                ) from None
        return self

    @property
    @override
    def needs_public_url(self) -> bool:
        """See ChatSettings."""
        return self.approve_in_chat

    def base(self) -> URL:
        """The server's address. Raises ValueError if it cannot be used."""
        return parse_receiver_url(self.api_url, allow_http=self.allow_http)

    def bearer(self) -> str:
        """The token as it is now. Raises ValueError if it cannot be sent."""
        token = self.reveal("token")
        if not (token and token.isascii() and token.isprintable() and " " not in token):
            raise ValueError(
                "expected the bot account's access token, of ASCII characters without spaces, got none or something else"
            )
        return token

    def key(self) -> bytes:
        """The key that proofs are sealed with, as it is now. Raises ValueError where there is none."""
        secret = self.reveal("secret")
        if secret is None:
            raise ValueError(
                "expected a secret or secret_file for approve_in_chat, got neither; imds-relay keys makes one"
            )
        return signature.key_of(secret)
