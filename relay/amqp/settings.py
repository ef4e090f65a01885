"""The settings of a connection to RabbitMQ."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import SecretStr, model_validator
from yarl import URL

from relay.amqp.broker_url import parse_urls
from relay.settings import Section


class BrokerSection(Section):
    """A section with the URL of a RabbitMQ."""

    url: SecretStr | None = None
    """amqp or amqps, user, password, host (several: with commas between) and virtual host.

    For amqps, ?cafile= names a private CA; certfile, keyfile and auth=external are for a client
    certificate.
    """
    url_file: Path | None = None
    """A file that holds the whole URL, instead of url. It is read again for every connection."""

    @model_validator(mode="after")
    def _check_url(self) -> Self:
        if self.url is None and self.url_file is None:
            raise ValueError("expected url or url_file, got neither")
        try:
            self.targets()
        except ValueError as error:
            field = "url" if self.url_file is None else "url_file"
            raise ValueError(f"{field}: {error}") from None
        return self

    def targets(self) -> tuple[URL, ...]:
        """Return the current URL, once for each host. Raises ValueError if it is unusable."""
        return parse_urls(self.reveal("url") or "")
