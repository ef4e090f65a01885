"""``check``, ``keys`` and ``schema``: what needs no running relay."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from relay.cli.check import evaluate_rules_for_document
from relay.config import load
from relay.config.model import NO_RULE_FOR_USER_EVENTS
from relay.events.build import CATALOG
from relay.imds.document import parse_document
from relay.simulator.event import rfc1123
from tests.certificates import FOLDER
from tests.cli.command import ROOT, CommandResult, run_command
from tests.events.strategies import azure_event
from tests.journey.relay_process import SECRET

DOCUMENT = f"""
scope: west
sinks:
  - kind: webhook
    name: drain
    url: https://drain.example.com/tok3n
    secrets: ["{SECRET}"]
    match: {{resources: ["db-*"]}}
  - {{kind: rabbitmq, name: bus, url: "amqp://user:p4ssword@mq.example.com/"}}
approvals:
  rules:
    - {{name: freeze, match: {{event_type: [Freeze], duration: {{max: 8s}}}}, approve: automatic}}
    - {{name: night, match: {{time: {{days: [sat, sun], from: "22:00", to: "04:00"}}}},
       approve: automatic}}
    - name: rest
      approve: {{votes: 2, from: ["client:a", "local:root"], expires: 30m, close_before: 60s}}
  limits:
    - {{name: databases, match: {{resources: ["db-*"]}}, max: 1, rest: 2m}}
api:
  clients: [{{name: a, key: tops3cret-tops3cret-tops3, can: [approve], resources: ["db-*"]}}]
"""


@pytest.fixture
def relay_yaml(tmp_path: Path) -> str:
    file = tmp_path / "relay.yaml"
    file.write_text(DOCUMENT)
    return str(file)


REMINDED = {"votes": 1, "from": ["local:root"], "remind": "20m"}
"""A quorum whose reminder is due for `event`."""


def azure(*events: Mapping[str, Any]) -> bytes:
    """A document as Azure writes it."""
    return json.dumps({"DocumentIncarnation": 1, "Events": events}).encode()


def event(**fields: Any) -> dict[str, Any]:
    not_before = rfc1123(datetime.now(UTC) + timedelta(minutes=15))
    return azure_event(**{"Resources": ["db-0"], "NotBefore": not_before, **fields})


# --- check


def checked(folder: Path, text: str, *arguments: str) -> CommandResult:
    file = folder / "relay.yaml"
    file.write_text(text)
    return run_command("check", "--config", str(file), *arguments)


def test_check_says_what_would_run_and_shows_no_secret(relay_yaml: str, tmp_path: Path) -> None:
    (tmp_path / "document.json").write_bytes(azure(event()))
    against = ("--against", str(tmp_path / "document.json"))
    result = run_command("check", "--config", relay_yaml, *against)
    as_json = run_command("check", "--config", relay_yaml, *against, "--json")
    assert (result.code, as_json.code) == (0, 0)
    assert as_json.json["file"] == relay_yaml
    assert [each["limits"] for each in as_json.json["events"]] == [["databases"]]
    assert relay_yaml in result.out
    for text in (
        "https://drain.example.com",
        "machines db-*",
        "amqp://mq.example.com",
        "type Freeze; takes 0 to 8 s",
        "2 votes of client:a, local:root, each good for 30 min, until 1 min before NotBefore",
        "every event",
        "22:00 to 04:00 UTC on sat, sun",
        "1 machine at once",
        "approved at once; limit databases: 1 machine at once",
    ):
        assert text in result.out, text
    assert result.out.index("freeze") < result.out.index("rest")
    for secret in ("tok3n", "p4ssword", "tops3cret-tops3cret-tops3cret", SECRET):
        assert secret not in result.out + result.err + as_json.out


PEOPLE = f"""
approvals:
  people:
    ann: ["client:ann", "slack:T024/U7"]
    ben: ["client:ben", "slack:T024/U8"]
  groups:
    oncall: ["person:ann", "person:ben", "client:reader"]
  rules:
    - {{name: freeze, match: {{event_type: [Freeze]}}, approve: automatic}}
    - {{name: rest, approve: {{votes: 2, from: ["group:oncall", "local:root"]}}}}
api:
  clients:
    - {{name: ann, key_sha256: "{"a" * 64}", can: [approve]}}
    - {{name: ben, key_sha256: "{"b" * 64}", can: [hold]}}
    - {{name: reader, key_sha256: "{"c" * 64}"}}
"""


def test_check_says_who_people_and_groups_are_and_who_can_vote(tmp_path: Path) -> None:
    """A client without the right to approve cannot, nor can its person in a chat."""
    result = checked(tmp_path, PEOPLE)
    words = [" ".join(line.split()) for line in result.out.splitlines()]
    for line in (
        "ann client:ann, slack:T024/U7",
        "ben client:ben, slack:T024/U8",
        "oncall person:ann, person:ben, client:reader",
        "rest 2 local:root; person:ann (client:ann, slack:T024/U7)",
    ):
        assert line in words, line
    root = {"name": "local:root", "principals": ["local:root"]}
    ann = {"name": "person:ann", "principals": ["client:ann", "slack:T024/U7"]}
    voters = checked(tmp_path, PEOPLE, "--json").json["voters"]
    assert voters == [{"rule": "rest", "votes": 2, "voters": [root, ann]}]


USER_RULE = "{name: user, match: {event_source: [user]}, approve: automatic}"
REBOOT_RULE = "{name: rest, match: {event_type: [Reboot]}, approve: automatic}"
RULES = f"""
approvals:
  rules:
    - {USER_RULE}
    - {{name: short, match: {{duration: {{max: 8s}}}}, approve: automatic}}
    - {{name: gone, match: {{event_type: [Terminate, Preempt]}}, approve: automatic}}
    - {REBOOT_RULE}
  limits:
    - {{name: few, match: {{event_source: [Platform]}}, max: 1}}
sinks:
  - {{kind: webhook, name: hook, url: "https://a.example", match: {{duration: {{min: 30s}}}},
     secrets: [{SECRET}]}}
"""
NO_NAMES = "source.url: discover is for VMs without a virtual network. They have no instance"
DISCOVER = f"approvals: {{rules: [{USER_RULE}]}}\nsource: {{url: discover}}\nrelay: one"


def rules(*entries: str, api_version: str = "2020-07-01") -> str:
    return f'source: {{api_version: "{api_version}"}}\napprovals: {{rules: [{", ".join(entries)}]}}'


@pytest.mark.parametrize(
    ("text", "warned"),
    [
        ("", [NO_RULE_FOR_USER_EVENTS]),
        (rules(USER_RULE, api_version="2019-08-01"), []),
        (rules(USER_RULE, api_version="2019-04-01"), [NO_RULE_FOR_USER_EVENTS, "rule user never"]),
        (
            rules(USER_RULE, REBOOT_RULE, api_version="2019-04-01"),
            ["rule user never matches with source.api_version 2019-04-01: "],
        ),
        (
            rules(USER_RULE, api_version="2020-07-02"),
            ["source.api_version: 2020-07-02 is none of the versions that Microsoft lists: 2017-"],
        ),
        (f'source: {{api_version: "2020-07-01"}}{RULES}', []),
        (
            f'source: {{api_version: "2019-08-01"}}{RULES}',
            ["rule short never matches", "match of sink hook never matches"],
        ),
        (
            f'source: {{api_version: "2017-03-01"}}{RULES}',
            [f"{name} never" for name in ("rule user", "rule short", "rule gone", "limit few")]
            + ["match of sink hook never"],
        ),
        (DISCOVER, [NO_NAMES]),
        (f"{DISCOVER}\nscope: classic", []),
        (
            f"{rules(USER_RULE)}\napi: {{clients: [{{name: ghost}}, {{name: b, amqp_user: u}}]}}",
            ["client ghost: nobody can be this client"],
        ),
        (
            f"{rules(USER_RULE)}\napi: {{socket: /absent/relay.sock}}",
            ["local socket: there is no folder /absent"],
        ),
    ],
)
def test_check_warns_of_what_has_no_effect(tmp_path: Path, text: str, warned: list[str]) -> None:
    """A folder of a socket that is not there is no error: a service manager may make it."""
    warnings: list[str] = checked(tmp_path, text, "--json").json["warnings"]
    assert len(warnings) == len(warned), warnings
    for warning, begins in zip(warnings, warned, strict=True):
        assert warning.startswith(begins)
        assert " never matches" not in warning or "Remedy: api_version: 2020-07-01" in warning
    shown = checked(tmp_path, text)
    assert (shown.code, shown.err.count("warning: ")) == (0, len(warned))


@pytest.mark.parametrize("wrong", ["cert_file", "key_file", "client_ca_file"])
def test_check_refuses_the_tls_files_that_run_refuses(tmp_path: Path, wrong: str) -> None:
    names = {"cert_file": "server", "key_file": "server", "client_ca_file": "authority"}
    tls = {key: str(FOLDER / f"{name}.pem") for key, name in names.items()}
    assert checked(tmp_path, json.dumps({"api": {"tls": tls}})).code == 0
    result = checked(tmp_path, json.dumps({"api": {"tls": {**tls, wrong: str(FOLDER / "no.pem")}}}))
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("imds-relay: api.tls")
    assert "no.pem" in result.err
    assert result.err.endswith("No such file or directory\n")


def test_without_a_file_the_defaults_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = run_command("check")
    assert result.code == 0
    assert "the defaults: there is no file" in result.out


def test_check_against_a_document_says_what_rules_decide(relay_yaml: str, tmp_path: Path) -> None:
    document = tmp_path / "document.json"
    document.write_bytes(
        azure(
            event(EventId="A"),
            event(EventId="B", DurationInSeconds=-1),
            event(EventId="C", EventStatus="Started"),
            event(EventId="D", NotBefore="Mon, 11 Apr 2022 22:26:58 GMT"),
        )
    )
    result = run_command("check", "--config", relay_yaml, "--against", str(document), "--json")
    keys = ("eventId", "rule", "approved")
    decisions = [tuple(decision[key] for key in keys) for decision in result.json["events"]]
    assert decisions[:2] == [("A", "freeze", True), ("B", "rest", False)]
    assert decisions[2:] == [("C", "freeze", False), ("D", "freeze", False)]
    shown = run_command("check", "--config", relay_yaml, "--against", str(document)).out
    assert "approved at once" in shown
    assert "nothing, it has started" in shown
    assert "nothing, NotBefore has passed" in shown


@pytest.mark.parametrize(
    ("content", "sentence"),
    [(b"", ""), (b"{}", ""), (b"no JSON", ""), (b"[]", "expected a JSON object"), (None, "read")],
    ids=["empty", "no events", "no JSON", "list", "absent"],
)
def test_check_against_what_is_no_document_exits_with_2(
    relay_yaml: str, tmp_path: Path, content: bytes | None, sentence: str
) -> None:
    document = tmp_path / "document.json"
    if content is not None:
        document.write_bytes(content)
    result = run_command("check", "--config", relay_yaml, "--against", str(document))
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("imds-relay: --against: ")
    assert sentence in result.err
    assert len(result.err.splitlines()) == 1


# --- the rule set of Microsoft's sample


def sample_approves(one: Mapping[str, Any]) -> bool:
    """Return the decision of `advanced_sample` in Microsoft's pages; False where it would fail."""
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
def test_rules_of_the_sample_approve_exactly_what_it_approves(events: list[dict[str, Any]]) -> None:
    for number, one in enumerate(events):
        one |= {
            "EventId": f"event-{number}",
            "NotBefore": event()["NotBefore"],
        }  # a run of tests may have begun long ago
    config = load(ROOT / "config/examples/docs-sample.yaml", {}).config
    document = parse_document(azure(*events))
    decisions = evaluate_rules_for_document(config, document, datetime.now(UTC))
    approved = {one["eventId"]: one["approved"] for one in decisions}
    assert approved == {one["EventId"]: sample_approves(one) for one in events}


@pytest.mark.parametrize(
    ("approved", "approvals"),
    [
        (True, {"rules": [{"name": "any", "approve": "automatic"}], "dry_run": True}),
        (False, {"rules": [{"name": "any", "approve": "automatic"}], "enabled": False}),
        (False, {"rules": [{"name": "any", "approve": REMINDED}]}),
    ],
)
def test_check_calls_approved_what_the_rules_allow_without_a_vote(
    tmp_path: Path, approvals: dict[str, Any], approved: bool
) -> None:
    (tmp_path / "document.json").write_bytes(azure(event()))
    document = str(tmp_path / "document.json")
    result = checked(
        tmp_path, json.dumps({"approvals": approvals}), "--against", document, "--json"
    )
    assert [each["approved"] for each in result.json["events"]] == [approved]


# --- keys


def test_keys_makes_a_key_its_digest_and_a_secret_for_the_configuration(tmp_path: Path) -> None:
    made = run_command("keys", "--json").json
    assert made["key"].startswith("imdsr_")
    assert made["key_sha256"] == hashlib.sha256(made["key"].encode()).hexdigest()
    assert len(base64.b64decode(made["secret"].removeprefix("whsec_"), validate=True)) == 32
    assert made != run_command("keys", "--json").json
    file = tmp_path / "relay.yaml"
    file.write_text(run_command("keys", "--name", "007").out)
    (client,) = load(file, {}).config.api.clients
    assert (client.name, len(client.key_sha256), len(client.secrets)) == ("007", 1, 1)


# --- schema


def test_schema_prints_each_schema_by_its_short_and_its_whole_name() -> None:
    everything = run_command("schema").json
    assert list(everything) == [definition.type for definition in CATALOG]
    for definition in CATALOG[:3]:
        names = (definition.name, definition.type)
        shown = [run_command("schema", name).json for name in names]
        assert shown == [everything[definition.type]] * 2
    for schema in everything.values():
        jsonschema.Draft202012Validator.check_schema(schema)


def test_schema_lists_the_types() -> None:
    listed = run_command("schema", "--list")
    assert all(definition.type in listed.out for definition in CATALOG)
    listed = run_command("schema", "--list", "--json").json
    assert [each["type"] for each in listed] == [definition.type for definition in CATALOG]


def test_a_hub_is_shown_with_its_domains_and_without_a_metadata_service(tmp_path: Path) -> None:
    result = checked(
        tmp_path,
        'fleet: {role: hub, url: "amqp://imds-hub:p4ssword@mq.example.com/prod", '
        'domains: [{user: vmss-a, scopes: ["vmss-a-*", one]}]}',
    )
    assert result.code == 0
    assert re.search(r"^fleet +hub, over mq\.example\.com:5672$", result.out, re.MULTILINE)
    assert re.search(r"^source +what the agents of the fleet report$", result.out, re.MULTILINE)
    assert re.search(r"^vmss-a +vmss-a-\*, one +\*$", result.out, re.MULTILINE)
    assert "169.254" not in result.out
    assert "p4ssword" not in result.out
    assert NO_RULE_FOR_USER_EVENTS in result.err
