"""The certificates of one sink: whom it trusts, and the one that it shows itself. Files are read again when they change."""

from __future__ import annotations

import os
import ssl
from pathlib import Path

from pydantic import model_validator

from relay.files import reason
from relay.net.tls_context import client_context, load_certificate
from relay.settings import Section


class ClientTlsSettings(Section):
    """Certificates for one receiver."""

    ca_file: Path | None = None
    """The certificates that are trusted, PEM, instead of those that this machine trusts."""
    cert_file: Path | None = None
    """The certificate that is shown to the receiver, with its chain, PEM."""
    key_file: Path | None = None
    """Its private key, PEM without a passphrase; left out where cert_file holds it."""

    @model_validator(mode="after")
    def _usable(self) -> ClientTlsSettings:
        if self.key_file is not None and self.cert_file is None:
            raise ValueError("cert_file: expected a certificate for key_file, got none")
        make_context(self)
        return self


def make_context(settings: ClientTlsSettings) -> ssl.SSLContext:
    """A context of the files as they are now. Raises ValueError, which names the file and holds nothing of it."""
    what = "ca_file"
    try:
        context = client_context(settings.ca_file)
        if settings.cert_file is not None:
            what = "cert_file" if settings.key_file is None else "cert_file and key_file"
            load_certificate(context, settings.cert_file, settings.key_file)
    except ssl.SSLError as error:
        raise ValueError(
            f"{what}: expected PEM that fits together, got something else ({error.reason or 'it could not be read'})"
        ) from None
    except OSError as error:
        raise ValueError(f"{what}: expected a readable file: {reason(error)}") from None
    return context


class ReloadingTlsContext:
    """A context that is made anew when one of its files has changed; while they cannot be used, the last one holds."""

    def __init__(self, settings: ClientTlsSettings) -> None:
        self._settings = settings
        self._stamps = self._look()
        self._context = make_context(settings)

    def context(self) -> ssl.SSLContext:
        """The context for the next request."""
        stamps = self._look()
        if stamps != self._stamps:
            try:
                self._context = make_context(self._settings)
            except ValueError:
                return self._context  # one of the files is just being replaced
            self._stamps = stamps
        return self._context

    def _look(self) -> tuple[tuple[int, int, int] | None, ...]:
        return tuple(
            _stamp(file)
            for file in (self._settings.ca_file, self._settings.cert_file, self._settings.key_file)
        )


def _stamp(file: Path | None) -> tuple[int, int, int] | None:
    if file is None:
        return None
    try:
        found = os.stat(file)  # noqa: PTH116  # what Path.stat does, on every delivery
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
