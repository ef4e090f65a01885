"""TLS on the listener: its certificate is read again when the files change, as they do when it is renewed."""

from __future__ import annotations

import logging
import ssl

from relay.api import ServerTlsSettings
from relay.errors import ConfigError

_log = logging.getLogger(__name__)
_Stamps = tuple[tuple[int, int, int], ...]


class ServerTlsContext:
    """The context for the next connection. Raises ConfigError when made of files that cannot be used."""

    def __init__(self, settings: ServerTlsSettings) -> None:
        self._settings = settings
        self._stamps = self._look()
        self._context = self._load()

    def context(self) -> ssl.SSLContext:
        """Made anew when a file has changed; while the new ones cannot be used, the last one that could."""
        stamps = self._look()
        if stamps != self._stamps:
            self._stamps = stamps
            try:
                self._context = self._load()
            except ConfigError as error:
                _log.warning("%s. The certificate before it stays in use", error)
        return self._context

    def _look(self) -> _Stamps:
        files = (self._settings.cert_file, self._settings.key_file, self._settings.client_ca_file)
        stamps = []
        for file in files:
            try:
                found = file.stat() if file is not None else None
            except OSError:
                found = None
            stamps.append(
                (found.st_mtime_ns, found.st_size, found.st_ino) if found is not None else (0, 0, 0)
            )
        return tuple(stamps)

    def _load(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        settings = self._settings
        try:
            # The empty password keeps OpenSSL from asking for one on the terminal.
            context.load_cert_chain(settings.cert_file, settings.key_file, password="")
        except OSError as error:
            raise ConfigError(
                f"api.tls: expected a certificate in PEM in {settings.cert_file} and its key, not encrypted, in {settings.key_file}: "
                f"{_why(error)}"
            ) from error
        if settings.client_ca_file is not None:
            context.verify_mode = ssl.CERT_REQUIRED
            try:
                context.load_verify_locations(settings.client_ca_file)
            except OSError as error:
                raise ConfigError(
                    f"api.tls.client_ca_file: expected certificates in PEM in {settings.client_ca_file}: {_why(error)}"
                ) from error
        return context


def _why(error: OSError) -> str:
    return getattr(error, "reason", None) or error.strerror or type(error).__name__
