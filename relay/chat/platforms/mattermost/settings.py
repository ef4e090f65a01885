"""The section of the configuration for one channel of a Mattermost server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import SecretStr, model_validator
from typing_extensions import override
from yarl import URL

from relay import signature
from relay.approvals.principals import PrincipalForm
from relay.chat import AnswerableChatSettings
from relay.net.egress import parse_receiver_url
from relay.settings import text_pattern_validator


class Settings(AnswerableChatSettings):
    """A channel of a Mattermost server, and the bot that posts there."""

    principals: ClassVar = PrincipalForm(
        "mattermost", "<team>/<user>", r"[a-z0-9]{26}/[a-z0-9]{26}"
    )

    kind: Literal["mattermost"]
    api_url: str
    """The server's own address, such as https://chat.example.com."""
    channel: Annotated[
        str,
        text_pattern_validator(
            r"[a-z0-9]{26}", "the id of a channel such as 4xp9fdt77pncbef59f4k1qe83o, not its name"
        ),
    ]
    """The id of the channel, in its menu under View Info. The bot must be a member."""
    token: SecretStr | None = None
    """The bot account's access token."""
    token_file: Path | None = None
    """A file with the token, instead of token."""
    approve_in_chat: bool = False
    """true: buttons that decide in the chat; needs secret. false: links to the page."""
    secret: SecretStr | None = None
    """Signs buttons: whsec_ and 24 to 64 random bytes in base64, known to this relay alone."""
    secret_file: Path | None = None
    """A file with the secret, instead of secret."""
    allow_http: bool = False
    """Allow an api_url with http: token and messages are then readable on the way."""

    @model_validator(mode="after")
    def _check_values(self) -> Settings:
        self.run_field_checks({"api_url": self.server_url, "token": self.bot_token})
        if self.approve_in_chat:
            self.run_field_checks({"secret": self.signing_key})
        return self

    @property
    @override
    def needs_public_url(self) -> bool:
        """Whether Mattermost calls the relay: for each click on a button, never for a link."""
        return self.approve_in_chat

    def server_url(self) -> URL:
        """Return the server's address. Raises ValueError if it is not usable."""
        return parse_receiver_url(self.api_url, allow_http=self.allow_http)

    def bot_token(self) -> str:
        """Return the current token. Raises ValueError if it cannot be sent."""
        token = self.reveal("token")
        if not (token and token.isascii() and token.isprintable() and " " not in token):
            raise ValueError(
                "expected the bot account's access token, of ASCII characters without spaces, "
                "got none or something else"
            )
        return token

    def signing_key(self) -> bytes:
        """Return the current key that signs action tokens. Raises ValueError if there is none."""
        secret = self.reveal("secret")
        if secret is None:
            raise ValueError(
                "expected a secret or secret_file for approve_in_chat, got neither; "
                "imds-relay keys makes one"
            )
        return signature.decode_secret(secret)
