"""The exchanges and queues of a fleet are those of docs/rabbitmq.md."""

from __future__ import annotations

from pathlib import Path

from relay.amqp.topology import Exchange, Queue
from relay.fleet.routing import (
    AGENT_QUEUE_ARGUMENTS,
    command_key,
    fleet_topology,
    hub_approvals_topology,
    scope_key,
)

PAGE = (Path(__file__).parents[2] / "docs" / "rabbitmq.md").read_text(encoding="utf-8")
MAIN = "azure.scheduledevents"


def line_of(title: str) -> str:
    (line,) = (line for line in PAGE.splitlines() if line.startswith(f"| {title}"))
    return line


def test_the_page_names_every_part_with_its_arguments_and_bindings() -> None:
    for part in (*fleet_topology(MAIN), *hub_approvals_topology(MAIN)):
        line = line_of(f"{part.title.replace(' ', ' `', 1)}`")
        assert part.type in line or part.name == f"{MAIN}.approvals.hub"
        if part.name == f"{MAIN}.approvals.hub":
            continue
        for name, value in part.arguments.items():
            assert name in line
            assert value is True or str(value) in line
        if isinstance(part, Queue):
            assert all(f"`{key}`" in line for key in part.keys)


def test_the_page_names_the_arguments_and_bindings_of_an_agents_queue() -> None:
    line = line_of("one queue for each agent")
    for name, value in AGENT_QUEUE_ARGUMENTS.items():
        assert f"`{name}` {value}" in line
    for key in (command_key("<scope>", "<relay>"), scope_key("<scope>")):
        assert f"`{key}`" in line


DEAD_LETTERS = (
    *("approve.#", "event.#", "relay.#", "vote.#", "start.#"),
    *("x.fleet.in", "x.approvals.hub"),
)


def test_the_parts_are_these_and_dead_letters_come_first() -> None:
    parts = {
        part.name: ("exchange", part.type)
        if isinstance(part, Exchange)
        else (part.source, part.type, *part.keys)
        for part in fleet_topology("x")
    }
    assert list(parts.items()) == [
        ("x.dlx", ("exchange", "topic")),
        ("x.dead", ("x.dlx", "quorum", *DEAD_LETTERS)),
        ("x.fleet", ("exchange", "topic")),
        ("x.commands", ("exchange", "topic")),
        (
            "x.fleet.in",
            ("x.fleet", "quorum", "event.#", "relay.#", "vote.#", "start.#", "pulse.#"),
        ),
    ]
