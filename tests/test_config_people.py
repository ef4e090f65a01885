"""People, groups and rules name principals that exist, and names that nobody mixes up."""

from __future__ import annotations

from pathlib import Path

import pytest

from relay.config import load
from relay.errors import ConfigError

TEAM_AND_USER = f"{'t' * 26}/{'u' * 26}"
TENANT_AND_OBJECT = "8f5f0d3c-59ac-4a4b-9d7b-0f0c7d2c1a11/0b1c2d3e-1111-2222-3333-444455556666"
DOCUMENT = """\
approvals:
  people:
    bob: [PERSON]
  groups:
    oncall: ["person:bob", GROUP]
  rules:
    - name: all
      approve: {votes: 1, from: ["client:bob", RULE]}
api:
  tls: {cert_file: /server.pem, key_file: /server.pem, client_ca_file: /ca.pem}
  clients:
    - {name: bob, key: bearer-test-key-of-bob, can: [approve], san: bob.internal}
    - {name: drain, key: bearer-test-key-of-drain, can: [approve]}
"""


def load_people(
    tmp_path: Path,
    *,
    person: str = "client:bob",
    group: str = "client:drain",
    rule: str = "local:root",
) -> None:
    file = tmp_path / "relay.yaml"
    values = {"PERSON": person, "GROUP": group, "RULE": rule}
    text = DOCUMENT
    for name, value in values.items():
        text = text.replace(name, f'"{value}"')
    file.write_text(text)
    load(file, {})


@pytest.mark.parametrize(
    ("place", "line"),
    [
        ("approvals.people.bob[0]", 3),
        ("approvals.groups.oncall[1]", 5),
        ("approvals.rules[0].approve.from[1]", 8),
    ],
)
@pytest.mark.parametrize(
    ("principal", "problem"),
    [
        (
            "client:Bob",
            (
                "expected a client of api.clients, client:Bob is none; did you mean client:bob? "
                "There are client:bob, client:drain"
            ),
        ),
        (
            "client:drian",
            (
                "expected a client of api.clients, client:drian is none; did you mean "
                "client:drain? There are client:bob, client:drain"
            ),
        ),
        (
            "client:nobody-near",
            (
                "expected a client of api.clients, client:nobody-near is none; there are "
                "client:bob, client:drain"
            ),
        ),
        (
            "mtls:BOB.internal",
            (
                "expected the san of a client of api.clients, mtls:BOB.internal is none; "
                "did you mean mtls:bob.internal? There is mtls:bob.internal"
            ),
        ),
    ],
)
def test_a_principal_of_no_client_is_an_error_with_its_place(
    tmp_path: Path, place: str, line: int, principal: str, problem: str
) -> None:
    key = {3: "person", 5: "group", 8: "rule"}[line]
    with pytest.raises(ConfigError) as error:
        load_people(tmp_path, **{key: principal})
    assert str(error.value) == f"{tmp_path / 'relay.yaml'}:{line}: {place}: {problem}"


@pytest.mark.parametrize(
    "principal",
    [
        "slack:T024BE7LH/U7",
        "slack:E024BE7LH/W012A3CDE",
        f"mattermost:{TEAM_AND_USER}",
        f"entra:{TENANT_AND_OBJECT}",
        "mtls:bob.internal",
        "local:Bob",
    ],
)
def test_a_well_formed_principal_is_accepted(tmp_path: Path, principal: str) -> None:
    load_people(tmp_path, person=principal)
    load_people(tmp_path, group=principal)
    load_people(tmp_path, rule=principal)


@pytest.mark.parametrize(
    "principal",
    [
        "slack:t024be7lh/u7",
        "slack:U7/T024BE7LH",
        "slack:T024BE7LH",
        "slack:T024BE7LH/bob",
        "mattermost:team/user",
        f"mattermost:{TEAM_AND_USER.upper()}",
        f"entra:{TENANT_AND_OBJECT.upper()}",
        "entra:example.com/bob",
    ],
)
def test_an_id_of_another_form_is_an_error_that_says_the_form(
    tmp_path: Path, principal: str
) -> None:
    kind = principal.partition(":")[0]
    for key in ("person", "group", "rule"):
        with pytest.raises(ConfigError, match=f"expected {kind}:.*; got {principal!r}"):
            load_people(tmp_path, **{key: principal})
