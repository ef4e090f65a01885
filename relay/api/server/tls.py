"""The TLS context of the listener. Reads the certificate again when its files change."""

from __future__ import annotations

import logging
import ssl
from pathlib import Path

from relay.api.settings import ServerTlsSettings
from relay.errors import ConfigError

_log = logging.getLogger(__name__)
_FileVersion = tuple[int, int, int]


class ServerTlsContext:
    """The TLS context for new connections. Raises ConfigError if the files cannot be used."""

    def __init__(self, settings: ServerTlsSettings) -> None:
        self._settings = settings
        self._versions = self._file_versions()
        self._context = self._load()

    def context(self) -> ssl.SSLContext:
        """Return the context for the current files; the last usable one if these are invalid."""
        versions = self._file_versions()
        if versions != self._versions:
            self._versions = versions
            try:
                self._context = self._load()
            except ConfigError as error:
                _log.warning("%s. The previous certificate stays in use", error)
        return self._context

    def _file_versions(self) -> tuple[_FileVersion | None, ...]:
        settings = self._settings
        files = (settings.cert_file, settings.key_file, settings.client_ca_file)
        return tuple(_file_version(path) for path in files if path is not None)

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


def _file_version(path: Path) -> _FileVersion | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def _reason(error: OSError) -> str:
    return getattr(error, "reason", None) or error.strerror or type(error).__name__
