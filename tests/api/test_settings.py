"""The configuration section `api`: valid values, and the errors for invalid ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from relay.api import ApiSettings, Client

SHA256 = "a" * 64
SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSwMfKQ9r8GKYo="
TLS = {"cert_file": "cert.pem", "key_file": "key.pem"}


@pytest.mark.parametrize(
    ("listen", "host", "port"),
    [
        ("127.0.0.1:8080", "127.0.0.1", 8080),
        ("[::1]:0", "::1", 0),
        ("localhost:65535", "localhost", 65535),
        ("127.9.8.7:1", "127.9.8.7", 1),
    ],
)
def test_loopback_addresses_need_no_tls(listen: str, host: str, port: int) -> None:
    settings = ApiSettings(listen=listen)
    assert (settings.host, settings.port) == (host, port)


@pytest.mark.parametrize(
    "listen",
    [
        "0.0.0.0:8080",
        "[::]:8080",
        "192.0.2.1:8080",
        "relay.example.com:443",
        "127.0.0.1.example.com:80",
    ],
)
def test_listening_beyond_loopback_needs_tls_or_allow_http(listen: str) -> None:
    with pytest.raises(ValidationError, match="expected tls, or allow_http: true behind a proxy"):
        ApiSettings(listen=listen)
    ApiSettings(listen=listen, allow_http=True)
    ApiSettings.model_validate({"listen": listen, "tls": TLS})


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"listen": "8080"}, "expected <host>:<port>"),
        ({"listen": "127.0.0.1:65536"}, "expected <host>:<port>"),
        ({"listen": "::1:8080"}, "expected <host>:<port>"),
        ({"listen": "127.0.0.1:"}, "expected <host>:<port>"),
        ({"public_url": "ftp://relay"}, "public_url"),
        ({"tls": {"cert_file": "cert.pem"}}, "key_file"),
        ({"socket": "/" + "x" * 107}, "expected a path of at most 107 bytes"),
        ({"more": 1}, "more"),
        ({"clients": [{}]}, "name"),
        ({"clients": [{"name": "a b"}]}, "name"),
        ({"clients": [{"name": "a", "can": ["everything"]}]}, "can"),
        ({"clients": [{"name": "a", "resources": []}]}, "resources"),
        ({"clients": [{"name": "a", "key_sha256": "abc"}]}, "expected 64 hexadecimal digits"),
        ({"clients": [{"name": "a", "key_sha256": [SHA256, "b" * 64, "c" * 64]}]}, "key_sha256"),
        ({"clients": [{"name": "a", "secrets": ["whsec_short"]}]}, "expected whsec_"),
        (
            {"clients": [{"name": "a", "key": "x", "key_file": "y"}]},
            "expected one of key and key_file",
        ),
        ({"clients": [{"name": "a"}, {"name": "a"}]}, "duplicate name: a"),
        (
            {"clients": [{"name": "a", "amqp_user": "u"}, {"name": "b", "amqp_user": "u"}]},
            "duplicate amqp_user: u",
        ),
        (
            {
                "clients": [
                    {"name": "a", "key_sha256": SHA256},
                    {"name": "b", "key_sha256": SHA256.upper()},
                ]
            },
            "a and b have the same key",
        ),
        (
            {"clients": [{"name": "a", "secrets": [SECRET]}, {"name": "b", "secrets": [SECRET]}]},
            "a and b have the same secret",
        ),
        (
            {
                "tls": TLS | {"client_ca_file": "ca.pem"},
                "clients": [{"name": "a", "san": "a.b"}, {"name": "b", "san": "A.b"}],
            },
            "duplicate san: a.b",
        ),
    ],
    ids=str,
)
def test_every_configuration_error_names_its_cause(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        ApiSettings.model_validate(wrong)


def test_one_key_digest_needs_no_list_and_every_key_counts(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("a-bearer-key-from-a-file\n")
    clients = [
        {"name": "a", "key_sha256": SHA256, "key_file": str(tmp_path / "key")},
        {"name": "b", "secrets": [SECRET]},
    ]
    first, second = ApiSettings.model_validate({"clients": clients}).clients
    assert (len(first.key_digests()), second.key_digests()) == (2, ())


def test_a_client_lists_its_kinds_of_credentials() -> None:
    ways = {
        "key": "bearer-test-key-of-nobody",
        "key_sha256": SHA256,
        "secrets": [SECRET],
        "san": "a.b",
        "amqp_user": "u",
    }
    known = {
        name: Client.model_validate({"name": "a", name: value}).credential_kinds
        for name, value in ways.items()
    }
    assert known == {
        "key": ("key",),
        "key_sha256": ("key",),
        "secrets": ("signature",),
        "san": ("certificate",),
        "amqp_user": ("RabbitMQ user u",),
    }
    assert Client(name="a").credential_kinds == ()


def test_no_error_or_repr_contains_a_secret() -> None:
    client = {
        "name": "a",
        "key": "hidden-key-hidden-key-hidden-key-hidden-key-hidden-key",
        "secrets": [SECRET],
    }
    settings = ApiSettings.model_validate({"clients": [client]})
    assert "hidden-key-hidden-key-hidden-key-hidden-key-hidden-key" not in repr(settings)
    assert SECRET not in repr(settings)
    with pytest.raises(ValidationError) as error:
        ApiSettings.model_validate({"clients": [client, {**client, "name": "b"}]})
    assert "hidden-key-hidden-key-hidden-key-hidden-key-hidden-key" not in str(error.value)
