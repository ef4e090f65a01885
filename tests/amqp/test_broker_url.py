"""Where the broker is: what a URL may say, and that it is never shown."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from yarl import URL

from relay.amqp.broker_url import BrokerSettings, host_port, parse_urls
from relay.config import Config
from tests.journey.relay_process import webhook

EXTERNAL = "?auth=external&cafile=/ca.pem&certfile=/relay.pem&keyfile=/key.pem"


@pytest.mark.parametrize(
    ("text", "places"),
    [
        ("amqp://h", ["h:5672"]),
        ("amqps://user:pass@h/prod", ["h:5671"]),
        ("amqp://user:pass@a,b:5673,[::1]/prod", ["a:5672", "b:5673", "[::1]:5672"]),
        ("amqp://u@se:r,1@a,b", ["a:5672", "b:5672"]),
        ("amqps://a,b" + EXTERNAL, ["a:5671", "b:5671"]),
    ],
)
def test_a_url_names_one_broker_or_several(text: str, places: list[str]) -> None:
    """Of several hosts, each has the same user, virtual host and files."""
    urls = parse_urls(text)
    assert [host_port(url) for url in urls] == places
    assert (
        len({(url.scheme, url.user, url.password, url.path, url.query_string) for url in urls}) == 1
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "hunter2",
        "http://user:hunter2@h/",
        "amqp:///hunter2",
        "amqp://user:hunter2@h:99999/",
        "amqp://hunter2:x@h:port/",
        "amqp://user:hunter2@a,,b/",
        "amqp://user:hunter2@a,/",
        "amqp://user:hunt#er2@h/",
        "amqp://user:hunt/er2@h/",
        "amqp://user:hunt?er2@h/",
        "amqps://h/?hunter2",
        "amqps://h/?cafile=a&cafile=hunter2",
        "amqps://h/?verify=hunter2",
        "amqp://h/?cafile=/hunter2",
        "amqps://h/?auth=hunter2",
        "amqps://h/?auth=external&keyfile=hunter2",
        "amqps://h/?keyfile=/hunter2",
    ],
)
def test_a_url_that_cannot_be_used_is_refused_without_being_shown(text: str) -> None:
    with pytest.raises(ValueError, match="expected ") as refused:
        parse_urls(text)
    assert "hunt" not in str(refused.value)
    assert refused.value.__cause__ is None


@pytest.mark.parametrize(
    "hosts",
    [
        "169.254.169.254",
        "168.63.129.16:5673",
        "[::ffff:169.254.169.254]",
        "[fe80::1]",
        "2852039166",
        "0xa9.254.43518",
        "broker.example.com,169.254.169.254",
        "[2002:a9fe:a9fe::1]",
        "[64:ff9b:1::a9fe:a9fe]",
    ],
)
def test_a_metadata_address_is_refused_before_it_is_dialled(hosts: str) -> None:
    """Each host, in any notation (docs/guarantees.md#metadata-addresses-are-never-dialed)."""
    with pytest.raises(
        ValueError, match="expected a broker's address, got a metadata or host address"
    ):
        parse_urls(f"amqp://user:hunter2@{hosts}/")
    with pytest.raises(ValidationError, match="url: expected a broker's address"):
        BrokerSettings.model_validate({"url": f"amqp://user:hunter2@{hosts}/"})


@given(st.text(max_size=40))
def test_any_text_is_a_url_or_refused(text: str) -> None:
    """Nothing else is raised, wherever in a URL the text may stand."""
    for url in (
        text,
        f"amqp://{text}",
        f"amqp://u:{text}@h",
        f"amqp://u:p@{text}/v",
        f"amqps://u:p@h/v?{text}",
    ):
        with contextlib.suppress(ValueError):
            assert parse_urls(url)


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("amqp://user:hunter2@broker.example.com/prod", "broker.example.com:5672"),
        ("amqps://user:hunter2@broker.example.com", "broker.example.com:5671"),
        ("amqp://[::1]:1234/", "[::1]:1234"),
    ],
)
def test_a_broker_is_named_by_host_and_port_alone(url: str, name: str) -> None:
    assert host_port(URL(url)) == name


def test_a_url_in_a_file_is_read_again_when_it_changes(tmp_path: Path) -> None:
    file = tmp_path / "url"
    file.write_text("amqp://old@h/\n")
    section = BrokerSettings.model_validate({"url_file": file})
    assert section.broker_urls()[0].user == "old"
    file.write_text("amqps://newer@a,b/\n")
    urls = [(url.user, url.host) for url in section.broker_urls()]
    assert urls == [("newer", "a"), ("newer", "b")]


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({}, "expected url or url_file, got neither"),
        ({"url": "amqp://h:x/"}, "url: expected a URL such as"),
        ({"url": "amqps://h/?auth=external"}, "url: expected certfile with auth=external"),
    ],
)
def test_a_section_without_a_broker_is_refused(fields: dict[str, str], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        BrokerSettings.model_validate(fields)


def test_a_section_whose_file_names_no_broker_is_refused_without_showing_it(tmp_path: Path) -> None:
    file = tmp_path / "url"
    file.write_text("hunter2")
    with pytest.raises(ValidationError, match="url_file: expected a URL such as") as refused:
        BrokerSettings.model_validate({"url_file": file})
    assert "hunter2" not in str(refused.value)


# --- approvals over RabbitMQ in the configuration: a sink must publish the answers


AMQP = {"url": "amqp://h/"}


def sink(name: str = "bus", **fields: Any) -> dict[str, Any]:
    return {"kind": "rabbitmq", "name": name, "url": "amqp://h/", **fields}


@pytest.mark.parametrize(
    "sinks",
    [
        [],
        [webhook("https://drain.example.com/")],
        [sink(events=["event.*"])],
        [sink(events=["approval.recorded", "approval.granted", "startrequest.*"])],
        [
            sink("a", events=["approval.recorded"]),
            sink("b", events=["approval.granted", "approval.refused", "approval.voided"]),
        ],
    ],
    ids=["none", "a webhook", "events alone", "some answers", "half of them each"],
)
def test_approvals_whose_answers_would_go_nowhere_are_an_error(sinks: list[dict[str, Any]]) -> None:
    with pytest.raises(
        ValidationError,
        match=r"approvals\.amqp: expected a rabbitmq sink whose events include approval",
    ):
        Config.model_validate({"sinks": sinks, "approvals": {"amqp": AMQP}})
    assert Config.model_validate({"sinks": sinks}).approvals.amqp is None


@pytest.mark.parametrize(
    "events",
    [
        ["*"],
        ["approval.*"],
        ["event.*", "approval.*"],
        [f"approval.{change}" for change in ("recorded", "granted", "refused", "voided")],
    ],
)
def test_queues_are_named_after_the_exchange_that_the_answers_go_to(events: list[str]) -> None:
    sinks = [
        sink("first", exchange="elsewhere", events=["event.*"]),
        sink("second", exchange="answers", events=events),
    ]
    config = Config.model_validate({"sinks": sinks, "approvals": {"amqp": AMQP}})
    assert config.approval_answers_exchange == "answers"
