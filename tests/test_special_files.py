"""A pipe or a device in the place of a secret or a certificate does not stop the relay.

Nothing here may wait for a pipe's writer: each test would never end.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import ValidationError

from relay.api.settings import Client, ServerTlsSettings
from relay.api.sockets import file_backed_server_context, make_server_context
from relay.errors import ConfigError
from relay.files import MAX_FILE_BYTES
from tests.certificates import LOCALHOST, Authority

KEY = "bearer-test-key-of-alice"


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


def link_to_endless_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def make_huge_file(path: Path) -> None:
    path.touch()
    os.truncate(path, MAX_FILE_BYTES + 1)


unusable = pytest.mark.parametrize(
    "put_unusable_file", [make_pipe, link_to_endless_device, make_huge_file]
)


@unusable
def test_a_secret_stays_while_its_file_is_no_file(
    tmp_path: Path, put_unusable_file: Callable[[Path], None]
) -> None:
    file = tmp_path / "key"
    file.write_text(KEY)
    client = Client.model_validate({"name": "alice", "key_file": file})
    file.unlink()
    put_unusable_file(file)
    assert client.reveal("key") == KEY
    with pytest.raises(ValidationError, match=r"no regular file|larger than"):
        Client.model_validate({"name": "alice", "key_file": file})


@unusable
@pytest.mark.parametrize("field", ["cert_file", "key_file", "client_ca_file"])
def test_certificates_stay_while_their_file_is_no_file(
    tmp_path: Path, field: str, put_unusable_file: Callable[[Path], None]
) -> None:
    content = Authority("authority").issue("localhost", LOCALHOST)
    files = {name: tmp_path / name for name in ("cert_file", "key_file", "client_ca_file")}
    for file in files.values():
        file.write_bytes(content)
    settings = ServerTlsSettings.model_validate(files)
    contexts = file_backed_server_context(settings)
    first = contexts.get()
    files[field].unlink()
    put_unusable_file(files[field])
    assert contexts.get() is first
    with pytest.raises(ConfigError, match=r"no regular file|larger than"):
        make_server_context(settings)
