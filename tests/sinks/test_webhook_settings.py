"""The webhook's section of the YAML document: what is taken, and how a wrong one is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from relay.sinks.webhook import Settings
from tests.sinks.webhook_sink import OTHER_SECRET, SECRET, TELLTALES

URL = "https://drain.example.com/hook/t0ken"
LEAST = {"kind": "webhook", "name": "drain", "url": URL, "secrets": [SECRET]}


def wrong(**fields: Any) -> str:
    with pytest.raises(ValidationError) as caught:
        Settings.model_validate({**LEAST, **fields})
    assert not [telltale for telltale in TELLTALES if telltale in str(caught.value)]
    return str(caught.value)


def test_defaults_are_those_of_the_documentation() -> None:
    settings = Settings.model_validate(LEAST)
    assert (
        settings.allow_http,
        settings.timeout,
        settings.give_up_after,
        settings.stale,
        settings.proxy,
    ) == (
        False,
        15.0,
        86400.0,
        "deliver",
        None,
    )
    assert settings.events == ("*",)
    assert str(settings.receiver_url()) == URL


def test_the_section_has_these_keys_and_no_others() -> None:
    assert set(Settings.model_fields) == {
        *("kind", "name", "url", "url_file", "secrets", "secrets_file", "events", "match"),
        *("allow_http", "timeout", "give_up_after", "stale", "rate", "proxy", "proxy_file"),
        *("bearer", "bearer_file", "basic", "headers", "headers_file", "tls"),
    }
    assert "retries: Extra inputs are not permitted" in wrong(retries=3).replace("\n  ", ": ")


def test_the_printed_section_shows_no_secret() -> None:
    assert not [
        telltale for telltale in TELLTALES if telltale in repr(Settings.model_validate(LEAST))
    ]


def test_url_and_secrets_may_live_in_files_and_are_read_again_when_these_change(
    tmp_path: Path,
) -> None:
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


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"url": None}, "expected url or url_file, got neither"),
        ({"url_file": __file__}, "expected one of url and url_file, got both"),
        ({"secrets": []}, "secrets: expected at least one secret"),
        (
            {"secrets": [SECRET, "whsec_t0kenAAAAA"]},
            "secrets: number 2: expected whsec_ and then 24 to 64 random bytes",
        ),
        (
            {"url": "http://drain.example.com/t0ken"},
            "url: expected https, got http: set allow_http: true",
        ),
        (
            {"url": "https://u:t0ken@drain.example.com/"},
            "url: expected a URL without user and password",
        ),
        (
            {"url": "https://t0ken@drain.example.com/"},
            "url: expected a URL without user and password",
        ),
        ({"url": "https://drain.example.com/#t0ken"}, "url: expected a URL without a fragment"),
        ({"url": "https://drain.example.com/#"}, "url: expected a URL without a fragment"),
        ({"url": "ftp://drain.example.com/t0ken"}, "url: expected a URL that starts with https://"),
        ({"url": "drain.example.com/t0ken"}, "url: expected a URL that starts with https://"),
        ({"url": "https:///t0ken"}, "url: expected a URL that starts with https://"),
        ({"url": ""}, "url: expected a URL that starts with https://"),
        ({"url": "https://drain.example.com:0/t0ken"}, "url: expected a port from 1 to 65535"),
        ({"url": "https://drain.example.com:99999/t0ken"}, "url: expected a URL such as"),
        ({"url": "https://[::1/t0ken"}, "url: expected a URL such as"),
        ({"url": "https://drain.example.com/t0 ken"}, "url: expected a URL without spaces"),
        (
            {"url": "https://drain.example.com/t0ken\r\nHost: x"},
            "url: expected a URL without spaces",
        ),
        ({"url": f"https://{'a' * 64}.t0ken/"}, "url: expected a host name"),
        ({"url": "https://a..b/t0ken"}, "url: expected a host name"),
        ({"url": f"https://{'a.' * 130}t0ken/"}, "url: expected a host name"),
        ({"url": "https://%31%36%39.254.169.254/"}, "url: expected a host name"),
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
        ({"basic": {"user": "u"}}, "bearer: expected password or password_file, got neither"),
        ({"basic": {"user": "u:t0ken", "password": "p"}}, "expected a user such as relay"),
        (
            {"headers": {"X-A": "t0ken\r\nX-B: c"}},
            "headers: expected printable ASCII characters as the value of X-A",
        ),
        ({"headers": {"X A": "t0ken"}}, "headers: expected names of letters, digits and hyphens"),
        (
            {"headers": {"Webhook-Id": "t0ken"}},
            "headers: expected headers that the relay does not send itself, got Webhook-Id",
        ),
        (
            {"headers": {"Host": "t0ken"}},
            "headers: expected headers that the relay does not send itself, got Host",
        ),
        (
            {"headers": {"authorization": "t0ken"}, "bearer": "t0ken"},
            "headers: expected headers that the relay does not send itself",
        ),
        (
            {"tls": {"key_file": "/no/such/file"}},
            "cert_file: expected a certificate for key_file, got none",
        ),
        (
            {"tls": {"ca_file": "/no/such/file"}},
            "ca_file: expected a readable file: No such file or directory",
        ),
        (
            {"tls": {"ca_file": "/dev/null"}},
            "ca_file: expected a readable file: it is no regular file",
        ),
        ({"rate": 0}, "Input should be greater than 0"),
        ({"proxy": "socks5://proxy/"}, "proxy: expected a URL that starts with"),
        (
            {"proxy": "http://169.254.169.254:3128"},
            "proxy: expected a receiver's address, got a metadata or host address",
        ),
        ({"timeout": "0s"}, "Input should be greater than 0"),
        ({"timeout": 15}, "expected a duration such as"),
        (
            {"secrets_file": "/no/such/file", "secrets": []},
            "expected a readable file, /no/such/file could not be read",
        ),
    ],
)
def test_a_wrong_section_says_where_what_was_expected_and_what_came_but_no_secret(
    fields: dict[str, Any], message: str
) -> None:
    assert message in wrong(**fields)


@pytest.mark.parametrize(
    "host",
    [
        *(
            "169.254.169.254",
            "169.254.0.1",
            "168.63.129.16",
            "2852039166",
            "0xa9fea9fe",
            "0251.0376.0251.0376",
            "169.254.43518",
        ),
        *(
            "0xa9.254.43518",
            "169.254.169.254.",
            "\uff11\uff16\uff19.254.169.254",
            "169\u3002254\u3002169\u3002254",
            "\u2460\u2465\u2468.254.169.254",
        ),
        *(
            "[fe80::1]",
            "[fe80::1%25eth0]",
            "[fe80::1%eth0]",
            "[FE80::1]",
            "[febf:ffff::1]",
            "[fd00:ec2::254]",
        ),
        *(
            "[::ffff:169.254.169.254]",
            "[::ffff:a9fe:a9fe]",
            "[64:ff9b::169.254.169.254]",
            "[64:ff9b::a83f:8110]",
        ),
    ],
)
@pytest.mark.parametrize("proxy", [None, "http://127.0.0.1:3128"])
def test_metadata_and_host_addresses_in_any_notation_are_refused_with_a_proxy_too(
    host: str, proxy: str | None
) -> None:
    assert "got a metadata or host address, which no sink may reach" in wrong(
        url=f"http://{host}/t0ken", allow_http=True, proxy=proxy
    )


@pytest.mark.parametrize("host", ["2130706433", "0x7f.1", "127.1", "0177.0.0.1", "127.0.0.1."])
def test_other_addresses_are_taken_in_their_usual_form_only(host: str) -> None:
    assert "expected an address in its usual form, 127.0.0.1" in wrong(url=f"https://{host}/t0ken")


@pytest.mark.parametrize(
    "url",
    [
        "https://127.0.0.1:8443/",
        "https://10.0.0.4/x?y=z",
        "https://[::1]/",
        "https://[fd00::1]/",
        "https://drain_service.internal./x",
        "https://müller.example/",
        "https://h",
        "HTTPS://Drain.Example.COM/",
    ],
)
def test_loopback_private_ranges_and_names_of_every_kind_are_where_receivers_live(url: str) -> None:
    assert Settings.model_validate({**LEAST, "url": url}).receiver_url().host
