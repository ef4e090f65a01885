"""The webhook's section of the YAML document: what is taken, and how a wrong one is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from relay.sinks.webhook import Settings
from tests.sinks.egress_namespace import LITERALS
from tests.sinks.webhook_sink import OTHER_SECRET, SECRET, TELLTALES

URL = "https://drain.example.com/hook/t0ken"
LEAST = {"kind": "webhook", "name": "drain", "url": URL, "secrets": [SECRET]}


def wrong(**fields: Any) -> str:
    with pytest.raises(ValidationError) as caught:
        Settings.model_validate({**LEAST, **fields})
    assert not [telltale for telltale in TELLTALES if telltale in str(caught.value)]
    return str(caught.value)


def test_url_and_secrets_may_be_in_files_and_are_read_again_at_changes(tmp_path: Path) -> None:
    url, secrets = tmp_path / "url", tmp_path / "secrets"
    url.write_text(f"{URL}\n")
    secrets.write_text(f"{SECRET}\n\n{OTHER_SECRET}\n")
    settings = Settings.model_validate(
        {"kind": "webhook", "name": "drain", "url_file": str(url), "secrets_file": str(secrets)}
    )
    assert settings.signing_secrets() == (SECRET, OTHER_SECRET)
    url.write_text("https://other.example.com/")
    secrets.write_text(OTHER_SECRET)
    assert str(settings.receiver_url()) == "https://other.example.com/"
    assert settings.signing_secrets() == (OTHER_SECRET,)


HEADERS_OF_OURS = "headers: expected headers that the relay does not send itself, got"
NOT_READABLE = "ca_file: expected a readable file:"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"url": None}, "expected url or url_file, got neither"),
        ({"secrets": []}, "secrets: expected at least one secret"),
        (
            {"secrets": [SECRET, "whsec_t0kenAAAAA"]},
            "secrets: number 2: expected whsec_ and then 24 to 64 random bytes",
        ),
        ({"proxy": "ftp://user:t0ken@proxy/"}, "proxy: expected a URL that starts with"),
        (
            {"proxy": "http://user:t0ken@169.254.169.254:3128/"},
            "proxy: expected a receiver's address, got a metadata or host address",
        ),
        ({"bearer": "t0ken two"}, "bearer: expected a token on one line"),
        (
            {"bearer": "t0ken", "basic": {"user": "u", "password": "t0ken"}},
            "bearer: expected one of bearer and basic, got both",
        ),
        ({"basic": {"user": "u"}}, "basic\n  Value error, expected password or password_file, got"),
        ({"basic": {"user": "u:t0ken", "password": "p"}}, "expected a user such as relay"),
        (
            {"headers": {"X-A": "t0ken\r\nX-B: c"}},
            "headers: expected printable ASCII characters as the value of X-A",
        ),
        ({"headers": {"X A": "t0ken"}}, "headers: expected names of letters, digits and hyphens"),
        ({"headers": {"Webhook-Id": "t0ken"}}, f"{HEADERS_OF_OURS} Webhook-Id"),
        ({"headers": {"authorization": "t0ken"}, "bearer": "t0ken"}, HEADERS_OF_OURS),
        ({"tls": {"key_file": "/no/file"}}, "expected a certificate for key_file, got none"),
        ({"tls": {"cert_file": __file__}}, "without key_file, cert_file must hold its key as well"),
        ({"tls": {"ca_file": "/no/file"}}, f"{NOT_READABLE} No such file or directory"),
        ({"tls": {"ca_file": "/dev/null"}}, f"{NOT_READABLE} it is no regular file"),
        ({"timeout": 15}, "expected a duration such as"),
        (
            {"secrets_file": "/no/file", "secrets": []},
            "expected a readable file, /no/file could not",
        ),
    ],
)
def test_a_wrong_section_says_where_what_was_expected_and_what_came_but_no_secret(
    fields: dict[str, Any], message: str
) -> None:
    assert message in wrong(**fields)


def test_a_wrong_url_is_told_without_its_text() -> None:
    for url, expected in (
        ("https://u:t0ken@drain.example.com/", "a URL without user and password"),
        ("https://drain.example.com/#t0ken", "a URL without a fragment"),
        ("ftp://drain.example.com/t0ken", "a URL that starts with https://"),
        ("", "a URL that starts with https://"),
        ("https://drain.example.com:0/t0ken", "a port from 1 to 65535"),
        ("https://drain.example.com:99999/t0ken", "a URL such as"),
        ("https://[::1/t0ken", "a URL such as"),
        ("https://drain.example.com/t0 ken", "a URL without spaces"),
        ("https://a..b/t0ken", "a host name"),
        (f"https://{'a.' * 130}t0ken/", "a host name"),
        ("https://%31%36%39.254.169.254/", "a host name"),
    ):
        assert f"url: expected {expected}" in wrong(url=url)


ODD_LITERALS = """
169.254.0.1 0xa9.254.43518 \uff11\uff16\uff19.254.169.254 169\u3002254\u3002169\u3002254
\u2460\u2465\u2468.254.169.254 [fe80::1%eth0] [FE80::1] [febf:ffff::1] [64:ff9b::a83f:8110]
"""


def test_metadata_and_host_addresses_in_any_notation_are_refused_with_a_proxy_too() -> None:
    for host in (*LITERALS.split(), *ODD_LITERALS.split()):
        for proxy in (None, "http://127.0.0.1:3128"):
            assert "got a metadata or host address, which no sink may reach" in wrong(
                url=f"http://{host}/t0ken", allow_http=True, proxy=proxy
            ), host


def test_other_addresses_are_taken_in_their_usual_form_only() -> None:
    for host in ("2130706433", "0x7f.1", "127.1", "0177.0.0.1", "127.0.0.1."):
        assert "expected an address in its usual form, 127.0.0.1" in wrong(url=f"https://{host}/x")


def test_loopback_private_ranges_and_names_of_every_kind_are_where_receivers_live() -> None:
    for url in (
        "https://127.0.0.1:8443/",
        "https://10.0.0.4/x?y=z",
        "https://[::1]/",
        "https://[fd00::1]/",
        "https://drain_service.internal./x",
        "https://müller.example/",
        "HTTPS://Drain.Example.COM/",
    ):
        assert Settings.model_validate({**LEAST, "url": url}).receiver_url().host
