"""Every configuration of the documentation is one: `imds-relay check` accepts it."""

from __future__ import annotations

import hashlib
import itertools
import re
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from tests.certificates import SERVER
from tests.cli.command import run_command
from tests.documented import EVERY_PAGE, Block, blocks, select
from tests.journey.relay_process import SECRET

OTHER = {"docs/simulator.md": "a playbook: tests/simulator/test_docs.py"}
"""Pages whose YAML is no configuration, and what it is."""
BLOCKS = [found for found in select(EVERY_PAGE, "yaml") if found.page not in OTHER]
HUB = blocks("docs/fleet.md", "yaml")[0]
CLIENTS = (
    "api: {clients: [{name: alice, key: KEY, can: [approve]},"
    " {name: db-drain, key: KEY, can: [approve]}]}"
)
ONCALL = 'approvals: {groups: {oncall: ["client:alice", "client:db-drain"]}}'
NEEDS = {
    ("README.md", "What you send back"): (CLIENTS, ONCALL),
    ("docs/configuration.md", "Rules"): (CLIENTS,),
    ("docs/chat/README.md", "How people answer"): (CLIENTS,),
    ("docs/fleet.md", "Each machine votes for itself"): (HUB,),
    ("docs/fleet.md", "Limits: how much may go at once"): (HUB,),
    ("docs/rabbitmq.md", "Approvals in"): blocks("docs/rabbitmq.md", "yaml", "RabbitMQ"),
}
"""What a block takes for granted, by its page and heading."""
SECRETS = {
    "app_token_file": "xapp-1-A024BE7LD-1-abc",
    "token_file": "xoxb-1-a-token",
    "secret_file": SECRET,
    "secrets_file": SECRET,
    "key_file": "KEY",
    "urls_file": "ntfys://ntfy.example.com/topic",
}
"""What is in a file, by the key that names it. Another file has a certificate and its key."""
URLS = {
    "teams": "https://teams.example/workflows/1?sig=2",
    "hub": "amqps://imds-hub:secret@broker.example.com/prod",
    "agent": "amqps://vmss-web:secret@broker.example.com/prod",
}
"""What is in a `url_file`, by the kind of the sink or the role of the relay."""
_numbers = itertools.count()


def test_no_page_is_left_out_for_nothing() -> None:
    assert {found.page for found in select(EVERY_PAGE, "yaml")} > OTHER.keys()
    places = {(found.page, found.heading) for found in BLOCKS}
    assert [place for place in NEEDS if place not in places] == []


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.place)
def test_a_configuration_of_a_page_is_accepted(block: Block, tmp_path: Path) -> None:
    document: dict[str, Any] = {}
    for text in (*NEEDS.get((block.page, block.heading), ()), block.text):
        merge(document, YAML(typ="safe", pure=True).load(text))
    write_files(document, tmp_path, kind="")
    file = tmp_path / "relay.yaml"
    with file.open("w") as stream:
        YAML(typ="safe", pure=True).dump(filled(document), stream)
    with pytest.MonkeyPatch.context() as patch:
        for name in re.findall(r"\$\{(\w+)\}", block.text):
            patch.setenv(name, SECRET if name.endswith("SECRET") else "of-the-environment")
        result = run_command("check", "--config", str(file))
    assert result.code == 0, result.err


def merge(document: dict[str, Any], added: dict[str, Any]) -> None:
    for key, value in added.items():
        there = document.setdefault(key, value)
        if there is value:
            continue
        if isinstance(value, dict):
            merge(there, value)
        else:
            there.extend(value)


def write_files(section: Any, folder: Path, kind: str) -> None:
    """Write the files that a configuration names, and name these instead."""
    if isinstance(section, list):
        for item in section:
            write_files(item, folder, kind)
    if not isinstance(section, dict):
        return
    kind = str(section.get("kind", section.get("role", kind)))
    for key, value in section.items():
        if not key.endswith("_file"):
            write_files(value, folder, kind)
            continue
        file = folder / str(next(_numbers))
        is_certificate = key == "cert_file" or "cert_file" in section or key == "ca_file"
        content = URLS[kind] if key == "url_file" else SECRETS.get(key, "a-secret")
        file.write_text(SERVER.read_text() if is_certificate else content)
        section[key] = str(file)


def filled(value: Any) -> Any:
    """Return the configuration with a secret where a page has dots."""
    if isinstance(value, dict):
        return {key: filled(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [filled(inner) for inner in value]
    if value == "whsec_…":
        return SECRET
    number = next(_numbers)
    if value == "KEY":
        return f"imdsr_a-bearer-key-of-a-page-{number}"
    return hashlib.sha256(str(number).encode()).hexdigest() if value == "…" else value
