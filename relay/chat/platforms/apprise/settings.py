"""The section of an Apprise sink."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, SecretStr, model_validator

from relay.chat import ChatSettings
from relay.chat.platforms.apprise.plugin import ApprisePlugin, plugin_for
from relay.settings import Duration


class Settings(ChatSettings):
    """Services that Apprise speaks to; they are told, and nobody answers there."""

    kind: Literal["apprise"]
    urls: tuple[SecretStr, ...] = ()
    """Apprise's URLs of the services, one or more. They hold what is needed to post: they are treated as secrets."""
    urls_file: Path | None = None
    """A file that holds one a line, instead of urls."""
    allow_http: bool = False
    """Allow URLs whose messages can be read on the way, such as json:// where there is jsons://."""
    timeout: Duration = Field(default=30.0, gt=0)
    """For one message to one service, with all that it is sent to there."""

    @model_validator(mode="after")
    def _can_be_told(self) -> Settings:
        self.services()
        return self

    def services(self) -> dict[str, ApprisePlugin]:
        """The services as they are now, by their URLs. Raises ValueError where there is none, or one that cannot be used."""
        name = "urls_file" if self._files else "urls"
        urls = self.reveal_all("urls")
        if not urls:
            raise ValueError(f"{name}: expected at least one URL of Apprise, got none")
        found = {}
        for number, url in enumerate(urls, start=1):
            try:
                found[url] = plugin_for(url, allow_http=self.allow_http)
            except ValueError as error:
                raise ValueError(f"{name}: number {number}: {error}") from None
        return found
