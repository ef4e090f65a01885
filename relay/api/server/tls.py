"""The TLS context of the listener. Reads the certificate again when its files change."""

from __future__ import annotations

import logging
import ssl
from pathlib import Path

from relay.api.settings import ServerTlsSettings
from relay.errors import ConfigError
from relay.file_reload import FileBackedValue

_log = logging.getLogger(__name__)


class ServerTlsContext:
    """The context for the next connection. Raises ConfigError if the files cannot be used.

    If they cannot be used after a change, the last certificate stays in use.
    """

    def __init__(self, settings: ServerTlsSettings) -> None:
        self._settings = settings
        files = (settings.cert_file, settings.key_file, settings.client_ca_file)
        self._context = FileBackedValue(files, self._load, on_failure=_log_failure)

    def context(self) -> ssl.SSLContext:
        """Return the context, made of the current files."""
        return self._context.get()

    def _load(self) -> ssl.SSLContext:
        settings = self._settings
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            # The empty password keeps OpenSSL from asking for one on the terminal.
            context.load_cert_chain(settings.cert_file, settings.key_file, password="")
        except OSError as error:
            raise ConfigError(
                f"api.tls: expected a certificate in PEM in {settings.cert_file} and its key, "
                f"not encrypted, in {settings.key_file}: {_reason(error)}"
            ) from error
        if settings.client_ca_file is None:
            return context
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_verify_locations(settings.client_ca_file)
        except OSError as error:
            raise ConfigError(
                "api.tls.client_ca_file: expected certificates in PEM in "
                f"{settings.client_ca_file}: {_reason(error)}"
            ) from error
        return context


def _log_failure(error: Exception) -> None:
    _log.warning("%s. The certificate before it stays in use", error)


def _why(error: OSError) -> str:
    return getattr(error, "reason", None) or error.strerror or type(error).__name__
