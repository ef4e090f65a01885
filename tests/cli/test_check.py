"""``check``, ``init``, ``keys`` and ``schema``: what needs no running relay."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from relay.amqp import asyncapi
from relay.cli.check import decisions
from relay.config import NO_RULE_FOR_USER_EVENTS, load
from relay.events.catalog import CATALOG
from relay.imds.document import parse_document
from relay.simulator.event import rfc1123
from tests.certificates import FOLDER
from tests.cli.command import ROOT, run, typed
from tests.journey.relay_process import SECRET

DOCUMENT = f"""
scope: west
sinks:
  - {{kind: webhook, name: drain, url: "https://drain.example.com/tok3n", secrets: ["{SECRET}"], match: {{resources: ["db-*"]}}}}
  - {{kind: rabbitmq, name: bus, url: "amqp://user:p4ssword@mq.example.com/"}}
approvals:
  rules:
    - {{name: freeze, match: {{event_type: [Freeze], duration: {{max: 8s}}}}, approve: automatic}}
    - {{name: rest, approve: {{votes: 2, from: ["client:a", "local:root"], expires: 30m, close_before: 60s}}}}
api:
  clients: [{{name: a, key: tops3cret, can: [approve], resources: ["db-*"]}}]
"""


@pytest.fixture
def relay_yaml(tmp_path: Path) -> str:
    """A configuration with something of everything."""
    file = tmp_path / "relay.yaml"
    file.write_text(DOCUMENT)
    return str(file)


def azure(*events: Mapping[str, Any]) -> bytes:
    """A document as Azure writes it."""
    return json.dumps({"DocumentIncarnation": 1, "Events": events}).encode()


def event(**fields: Any) -> dict[str, Any]:
    """One of its events."""
    usual = {
        "EventId": "C7061BAC-AFDC-4513-B24B-AA5F13A16123",
        "EventStatus": "Scheduled",
        "EventType": "Freeze",
        "ResourceType": "VirtualMachine",
        "Resources": ["db-0"],
        "NotBefore": rfc1123(datetime.now(UTC) + timedelta(minutes=15)),
        "Description": "",
        "EventSource": "Platform",
        "DurationInSeconds": 5,
    }
    return {**usual, **fields}


# --- check


def test_check_says_what_would_run_and_shows_no_secret(relay_yaml: str) -> None:
    done = typed("check", "--config", relay_yaml)
    assert done.code == 0
    assert relay_yaml in done.out
    for said in (
        "https://drain.example.com",
        "machines db-*",
        "amqp://mq.example.com",
        "type Freeze; takes 0 to 8 s",
        "2 votes of client:a, local:root, each good for 30 min, until 1 min before NotBefore",
        "every event",
    ):
        assert said in done.out, said
    assert done.out.index("freeze") < done.out.index("rest")
    for secret in ("tok3n", "p4ssword", "tops3cret", SECRET):
        assert secret not in done.out + done.err


def test_check_shows_no_secret_as_json(relay_yaml: str) -> None:
    done = typed("check", "--config", relay_yaml, "--json")
    assert done.code == 0
    assert done.json["file"] == relay_yaml
    assert [rule["name"] for rule in done.json["config"]["approvals"]["rules"]] == [
        "freeze",
        "rest",
    ]
    for secret in ("tok3n", "p4ssword", "tops3cret", SECRET):
        assert secret not in done.out


def test_check_warns_where_no_rule_can_match_what_users_start(tmp_path: Path) -> None:
    file = tmp_path / "relay.yaml"
    for text, warned in (
        ("", True),
        (
            "approvals: {rules: [{name: a, match: {event_source: [user]}, approve: automatic}]}",
            False,
        ),
    ):
        file.write_text(text)
        done = typed("check", "--config", str(file))
        assert (done.code, NO_RULE_FOR_USER_EVENTS in done.err) == (0, warned)
        assert (typed("check", "--config", str(file), "--json").json["warnings"] != []) is warned


@pytest.mark.parametrize(
    ("cert_file", "key_file", "client_ca_file"),
    [("no", "server", "authority"), ("server", "no", "authority"), ("server", "server", "no")],
)
def test_check_refuses_the_tls_files_that_run_refuses(
    tmp_path: Path, cert_file: str, key_file: str, client_ca_file: str
) -> None:
    names = {"cert_file": cert_file, "key_file": key_file, "client_ca_file": client_ca_file}
    tls = {key: str(FOLDER / f"{name}.pem") for key, name in names.items()}
    file = tmp_path / "relay.yaml"
    file.write_text(json.dumps({"api": {"tls": tls}}))
    done = typed("check", "--config", str(file))
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("imds-relay: api.tls")
    assert "no.pem" in done.err
    assert done.err.endswith("No such file or directory\n")
    file.write_text(
        json.dumps(
            {"api": {"tls": {key: path.replace("/no.", "/server.") for key, path in tls.items()}}}
        )
    )
    assert typed("check", "--config", str(file)).code == 0


def test_check_warns_of_a_socket_in_a_folder_that_is_not_there(tmp_path: Path) -> None:
    """A service manager may make it at start, as the unit file's RuntimeDirectory does: no error."""
    file = tmp_path / "relay.yaml"
    file.write_text(f"api: {{socket: {tmp_path}/absent/relay.sock}}")
    done = typed("check", "--config", str(file))
    assert (
        done.code,
        f"warning: local socket: there is no folder {tmp_path}/absent" in done.err,
    ) == (0, True)
    (tmp_path / "absent").mkdir()
    assert "local socket" not in typed("check", "--config", str(file)).err


def test_check_warns_of_a_client_that_nobody_can_be(tmp_path: Path) -> None:
    file = tmp_path / "relay.yaml"
    file.write_text(
        f"api: {{clients: [{{name: ghost}}, {{name: a, key: k}}, {{name: b, secrets: ['{SECRET}']}}, {{name: c, amqp_user: u}}]}}"
    )
    done = typed("check", "--config", str(file))
    assert (done.code, "warning: client ghost: nobody can be this client" in done.err) == (0, True)
    (ghost,) = [
        one
        for one in typed("check", "--config", str(file), "--json").json["warnings"]
        if one.startswith("client ")
    ]
    assert "imds-relay keys" in ghost


def test_check_without_a_file_says_that_the_defaults_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = typed("check")
    assert done.code == 0
    assert "the defaults: there is no file" in done.out


def test_check_of_a_wrong_configuration_exits_with_2_and_a_sentence_for_each_error(
    tmp_path: Path,
) -> None:
    (tmp_path / "relay.yaml").write_text("scope: A\nsinks: x\n")
    done = run("check", cwd=tmp_path)
    assert (done.code, done.out) == (2, "")
    assert done.err.splitlines() == [
        "imds-relay: relay.yaml:1: scope: expected 'auto' or text that matches ^[a-z0-9-]{1,80}$; got 'A'",
        "imds-relay: relay.yaml:2: sinks: expected a list; got text",
    ]


def test_check_against_a_document_says_which_rule_decides_about_each_event(
    relay_yaml: str, tmp_path: Path
) -> None:
    document = tmp_path / "document.json"
    document.write_bytes(
        azure(
            event(EventId="A"),
            event(EventId="B", DurationInSeconds=-1),
            event(EventId="C", EventStatus="Started"),
            event(EventId="D", NotBefore="Mon, 11 Apr 2022 22:26:58 GMT"),
        )
    )
    done = typed("check", "--config", relay_yaml, "--against", str(document), "--json")
    assert [(one["eventId"], one["rule"], one["approved"]) for one in done.json["events"]] == [
        ("A", "freeze", True),
        ("B", "rest", False),
        ("C", "freeze", False),
        ("D", "freeze", False),
    ]
    shown = typed("check", "--config", relay_yaml, "--against", str(document)).out
    assert "approved at once" in shown
    assert "nothing, it has started" in shown
    assert "nothing, NotBefore has passed" in shown


def test_check_against_says_that_approvals_are_off(tmp_path: Path) -> None:
    (tmp_path / "relay.yaml").write_text(
        "approvals: {enabled: false, rules: [{name: a, approve: automatic}]}"
    )
    (tmp_path / "document.json").write_bytes(azure(event()))
    done = typed(
        "check",
        "--config",
        str(tmp_path / "relay.yaml"),
        "--against",
        str(tmp_path / "document.json"),
    )
    assert "nothing: approvals are off (else approved at once)" in done.out


@pytest.mark.parametrize("content", [b"", b"{}", b"no JSON", None])
def test_check_against_what_is_no_document_exits_with_2(
    relay_yaml: str, tmp_path: Path, content: bytes | None
) -> None:
    document = tmp_path / "document.json"
    if content is not None:
        document.write_bytes(content)
    done = typed("check", "--config", relay_yaml, "--against", str(document))
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("imds-relay: --against: ")
    assert len(done.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("content", "place"),
    [("[]", "document"), ('{"Events": [5]}', "Events.0"), ("null", "document")],
)
def test_check_against_json_that_is_no_object_says_so_in_words_of_json(
    tmp_path: Path, content: str, place: str
) -> None:
    (tmp_path / "relay.yaml").write_text("scope: west")
    document = tmp_path / "document.json"
    document.write_text(content)
    done = typed("check", "--config", str(tmp_path / "relay.yaml"), "--against", str(document))
    said = f"imds-relay: --against: {document}: expected a Scheduled Events document, {place}: expected a JSON object\n"
    assert (done.code, done.err) == (2, said)


# --- the rule set of Microsoft's sample


def sample_approves(one: Mapping[str, Any]) -> bool:
    """The decision of `advanced_sample` in Microsoft's pages, line by line; where that program would break off, no."""
    if one["EventStatus"] == "Started":
        return False
    if one["EventSource"] == "User":
        return True
    if one["EventType"] != "Freeze":
        return False
    try:
        return int(one["DurationInSeconds"]) >= 0 and int(one["DurationInSeconds"]) < 9
    except (KeyError, TypeError, ValueError):
        return False


@given(
    st.lists(
        st.builds(
            event,
            EventStatus=st.sampled_from(["Scheduled", "Started"]),
            EventType=st.sampled_from(
                ["Freeze", "Reboot", "Redeploy", "Preempt", "Terminate", "Frost"]
            ),
            EventSource=st.sampled_from(["User", "Platform", "", "Partner"]),
            DurationInSeconds=st.one_of(
                st.integers(-2, 12),
                st.integers(),
                st.integers(-2, 12).map(str),
                st.none(),
                st.just("soon"),
            ),
            Resources=st.lists(st.text(max_size=5), max_size=3),
            Description=st.text(max_size=5),
        ),
        max_size=4,
    )
)
@example(
    [
        event(DurationInSeconds=seconds, EventType=kind)
        for seconds in range(-2, 13)
        for kind in ("Freeze", "Reboot")
    ]
)
def test_the_rules_of_the_sample_approve_exactly_what_the_sample_approves(
    events: list[dict[str, Any]],
) -> None:
    for number, one in enumerate(events):
        one |= {
            "EventId": f"event-{number}",
            "NotBefore": event()["NotBefore"],
        }  # a run of tests may have begun long ago
    config = load(ROOT / "config/examples/docs-sample.yaml", {}).config
    approved = {
        one["eventId"]: one["approved"]
        for one in decisions(config, parse_document(azure(*events)), datetime.now(UTC))
    }
    assert approved == {one["EventId"]: sample_approves(one) for one in events}


# --- init


def test_what_init_prints_passes_check_on_a_machine_without_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    printed = typed("init")
    assert (printed.code, printed.err) == (0, "")
    (tmp_path / "relay.yaml").write_text(printed.out)
    done = typed("check")
    assert (done.code, done.err) == (0, "")
    assert "user-initiated" in done.out


# --- keys


def test_keys_makes_a_key_its_digest_and_a_secret_that_the_configuration_takes(
    tmp_path: Path,
) -> None:
    made = typed("keys", "--json").json
    assert made["key"].startswith("imdsr_")
    assert made["key_sha256"] == hashlib.sha256(made["key"].encode()).hexdigest()
    assert len(base64.b64decode(made["secret"].removeprefix("whsec_"), validate=True)) == 32
    assert made != typed("keys", "--json").json
    file = tmp_path / "relay.yaml"
    file.write_text(typed("keys", "--name", "db-drain").out)
    (client,) = load(file, {}).config.api.clients
    assert (client.name, len(client.key_sha256), len(client.secrets)) == ("db-drain", 1, 1)


# --- schema


def test_schema_prints_each_schema_by_its_short_and_its_whole_name() -> None:
    everything = typed("schema").json
    assert list(everything) == [one.type for one in CATALOG]
    for one in CATALOG[:3]:
        assert (
            typed("schema", one.name).json == typed("schema", one.type).json == everything[one.type]
        )
    for schema in everything.values():
        jsonschema.Draft202012Validator.check_schema(schema)


def test_schema_lists_the_types_and_refuses_another() -> None:
    listed = typed("schema", "--list")
    assert all(one.type in listed.out for one in CATALOG)
    assert [one["type"] for one in typed("schema", "--list", "--json").json] == [
        one.type for one in CATALOG
    ]
    done = typed("schema", "event.new")
    assert (done.code, done.err) == (
        2,
        "imds-relay: expected asyncapi, slack-manifest or a type of `imds-relay schema --list`, got 'event.new'\n",
    )


def test_schema_describes_both_directions_over_rabbitmq() -> None:
    """What it is made of is tested with the API."""
    assert typed("schema", "asyncapi").json == asyncapi.describe()
