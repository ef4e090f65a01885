"""The configuration section `api`: valid values, and the errors for invalid ones."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from relay.api.settings import ApiSettings, Client
from relay.config import Config

SHA256 = "a" * 64
SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSwMfKQ9r8GKYo="
GOOD_KEYS = [
    "Z" * 22,
    "imdsr_" + "Z" * 22,
    "0123456789abcdef" * 2,
    "an-everyday-pass-phrase",
    "ключ-ключ-ключ-ключ-ключ",
]
KEY_SHA256 = hashlib.sha256(GOOD_KEYS[2].encode()).hexdigest()
TLS = {"cert_file": "cert.pem", "key_file": "key.pem"}


def test_listening_beyond_loopback_needs_tls_or_allow_http() -> None:
    for listen, host, port in (
        ("127.0.0.1:8080", "127.0.0.1", 8080),
        ("[::1]:0", "::1", 0),
        ("localhost:65535", "localhost", 65535),
        ("127.9.8.7:1", "127.9.8.7", 1),
    ):
        settings = ApiSettings(listen=listen)
        assert (settings.host, settings.port) == (host, port)
    names = "relay.example.com:443", "127.0.0.1.example.com:80"
    for listen in ("0.0.0.0:8080", "[::]:8080", "192.0.2.1:8080", *names):
        with pytest.raises(ValidationError, match="expected tls, or allow_http: true behind a pr"):
            ApiSettings(listen=listen)
        ApiSettings(listen=listen, allow_http=True)
        ApiSettings.model_validate({"listen": listen, "tls": TLS})


def two(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """A section with the clients a and b."""
    return {"clients": [{"name": "a", **first}, {"name": "b", **second}]}


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"listen": "127.0.0.1:65536"}, "expected <host>:<port>"),
        ({"listen": "::1:8080"}, "expected <host>:<port>"),
        ({"listen": "127.0.0.1:"}, "expected <host>:<port>"),
        ({"public_url": "ftp://relay"}, "public_url"),
        ({"tls": {"cert_file": "cert.pem"}}, "key_file"),
        ({"clients": [{"name": "a b"}]}, "name"),
        ({"clients": [{"name": "a", "resources": []}]}, "resources"),
        ({"clients": [{"name": "a", "key_sha256": "abc"}]}, "expected 64 hexadecimal digits"),
        ({"clients": [{"name": "a", "key_sha256": [SHA256, "b" * 64, "c" * 64]}]}, "key_sha256"),
        ({"clients": [{"name": "a", "secrets": ["whsec_short"]}]}, "expected whsec_"),
        (
            {"clients": [{"name": "a", "key": "x", "key_file": "y"}]},
            "expected one of key and key_file",
        ),
        (
            {"tls": TLS | {"client_ca_file": "ca.pem"}, **two({"san": "a.b"}, {"san": "A.b"})},
            "differ by more than case, got a.b and A.b",
        ),
    ],
    ids=str,
)
def test_every_configuration_error_names_its_cause(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        ApiSettings.model_validate(wrong)


@pytest.mark.parametrize(
    ("clients", "kind"),
    [
        (two({"key_sha256": SHA256}, {"key_sha256": SHA256.upper()}), "key"),
        (two({"key": GOOD_KEYS[2]}, {"key_sha256": KEY_SHA256}), "key"),
        (two({"secrets": [SECRET]}, {"secrets": [SECRET]}), "secret"),
    ],
)
def test_two_clients_have_nothing_in_common(clients: dict[str, Any], kind: str) -> None:
    with pytest.raises(ValidationError, match=f"clients.0.: a and b have the same {kind}; give"):
        Config.model_validate({"api": clients})


WEAK_KEYS = [
    "",
    "x",
    "hunter2",
    "Z" * 21,
    " " * 8 + "Z" * 21 + " " * 8,
    "Z" * 20 + "==",  # padding says nothing
    "imdsr_" + "Z" * 21,  # nor does the prefix
    "0123456789ABCDEF0123456789abcde",
]


def test_a_key_has_at_least_128_bits_also_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "key"
    in_file = {"name": "a", "key_file": str(file)}
    for key in GOOD_KEYS:
        file.write_text(f"{key}\n")
        for section in ({"name": "a", "key": key}, in_file):
            assert len(Client.model_validate(section).key_digests()) == 1
    for key in WEAK_KEYS:
        with pytest.raises(ValidationError, match="imds-relay keys") as error:
            Client.model_validate({"name": "a", "key": key})
        assert len(key) < 3 or key not in str(error.value)
    client = Client.model_validate(in_file)
    file.write_text("weak\n")
    assert client.key_digests() == ()  # it is nobody's key
    with pytest.raises(ValidationError, match="key_file: expected a bearer key of 128 bits"):
        Client.model_validate(in_file)
    file.write_text("another-bearer-key-from-a-file\n")
    assert len(client.key_digests()) == 1


def test_the_digest_of_an_empty_key_is_an_error() -> None:
    empty = hashlib.sha256(b"").hexdigest()
    for digest in (empty, empty.upper()):
        with pytest.raises(ValidationError, match=r"empty text.*imds-relay keys"):
            Client.model_validate({"name": "a", "key_sha256": ["b" * 64, digest]})


def test_one_key_digest_needs_no_list_and_every_key_counts(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("a-bearer-key-from-a-file\n")
    clients = [
        {"name": "a", "key_sha256": SHA256, "key_file": str(tmp_path / "key")},
        {"name": "b", "secrets": [SECRET]},
    ]
    first, second = ApiSettings.model_validate({"clients": clients}).clients
    assert (len(first.key_digests()), second.key_digests()) == (2, ())


def test_a_client_lists_its_kinds_of_credentials() -> None:
    for name, value, kind in (
        ("key", "bearer-test-key-of-nobody", "key"),
        ("key_sha256", SHA256, "key"),
        ("secrets", [SECRET], "signature"),
        ("san", "a.b", "certificate"),
        ("amqp_user", "u", "RabbitMQ user u"),
    ):
        assert Client.model_validate({"name": "a", name: value}).credential_kinds == (kind,)
    assert Client(name="a").credential_kinds == ()
