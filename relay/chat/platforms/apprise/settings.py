"""The section of the configuration for an Apprise sink."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, SecretStr, model_validator

from relay.chat import ChatSettings
from relay.chat.platforms.apprise.service import AppriseService, load_service
from relay.settings import Duration


class Settings(ChatSettings):
    """Services that Apprise supports. They get notices, and nobody answers there."""

    kind: Literal["apprise"]
    urls: tuple[SecretStr, ...] = ()
    """Apprise's URLs of the services, at least one. They are secrets: who has one can post."""
    urls_file: Path | None = None
    """A file with one URL on each line, instead of urls."""
    allow_http: bool = False
    """Allow URLs without TLS, such as json:// in place of jsons://."""
    timeout: Duration = Field(default=30.0, gt=0)
    """For one message to one service, with all its recipients there."""

    @model_validator(mode="after")
    def _check_urls(self) -> Settings:
        self.load_services()
        return self

    def load_services(self) -> dict[str, AppriseService]:
        """Return the service of each current URL. Raises ValueError if one is not usable."""
        key = "urls_file" if self.has_secret_files else "urls"
        urls = self.reveal_list("urls")
        if not urls:
            raise ValueError(f"{key}: expected at least one URL of Apprise, got none")
        services = {}
        for number, url in enumerate(urls, start=1):
            try:
                services[url] = load_service(url, allow_http=self.allow_http)
            except ValueError as error:
                raise ValueError(f"{key}: number {number}: {error}") from None
        return services
