"""The ``source`` section of the YAML document."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from relay.imds import SourceSettings


def test_the_defaults_are_those_of_the_documentation() -> None:
    assert SourceSettings().model_dump() == {
        "url": "http://169.254.169.254",
        "api_version": "2020-07-01",
        "interval": 1.0,
        "timeout": 10.0,
        "first_timeout": 130.0,
    }


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://127.0.0.1:8169", "http://127.0.0.1:8169"),
        ("http://127.0.0.1:8169/", "http://127.0.0.1:8169"),
        ("https://simulator.example", "https://simulator.example"),
        ("http://[::1]:80", "http://[::1]:80"),
        ("discover", "discover"),
    ],
)
def test_a_url_is_an_origin(url: str, expected: str) -> None:
    assert SourceSettings(url=url).url == expected


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("169.254.169.254", "expected http:// or https://"),
        ("ftp://169.254.169.254", "expected http:// or https://"),
        ("http://", "expected http:// or https://"),
        ("Discover", "such as http://169.254.169.254, or discover"),
        ("http://host:99999", "expected http:// or https://"),
        ("http://host:0", "expected http:// or https://"),
        ("http://[::1", "expected http:// or https://"),
        ("", "expected http:// or https://"),
        ("http://user:hunter2@host", "without user and password"),
        ("http://hunter2@host", "without user and password"),
        ("http://host/metadata", "without path, query or fragment"),
        ("http://host?a=hunter2", "without path, query or fragment"),
        ("http://host#hunter2", "without path, query or fragment"),
    ],
)
def test_anything_else_is_refused_without_saying_what_may_be_secret(url: str, message: str) -> None:
    with pytest.raises(ValidationError) as error:
        SourceSettings(url=url)
    assert message in str(error.value)
    assert "hunter2" not in str(error.value)
