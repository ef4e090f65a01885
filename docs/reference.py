"""Generates parts of pages as Markdown: configuration, commands, API, log, Slack app."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import typer

from relay.api.server import Server
from relay.api.settings import ApiSettings
from relay.chat.platforms.slack import SCOPES
from relay.chat.platforms.slack.api import REMEDIES
from relay.cli import VERBS, make_app
from relay.clock import SystemClock
from relay.telemetry.lines import EVERY_LINE, LINES

STATUS_LEVELS = "warning; error if Azure answered 400"
"""The level of `startrequest.failed`."""
MARK = "<!-- what follows is written by `make docs` -->\n"


def with_generated_part(page: Path, generated: str) -> str:
    """Return the page with its handwritten part, and the generated part behind the mark."""
    return f"{page.read_text(encoding='utf-8').partition(MARK)[0]}{MARK}\n{generated}"


# --- command line


_RELAY_PANEL = "Which relay"
"""The panel of the options that all verbs for a running relay share."""


def commands() -> str:
    """Return a line for each verb, with its arguments and options; `--help` says what these do."""
    lines = []
    for panel, names in VERBS.items():
        lines += [f"## {panel}", ""]
        for name in names:
            lines += map(_line_of_verb, _verbs(name, typer.main.get_command(make_app([name]))))
        lines.append("")
    return "\n".join(lines)


def _verbs(name: str, group: Any) -> Iterator[tuple[str, Any]]:
    """Yield a verb, or the verbs of a group."""
    # Typer does not export the types of its click.
    command = group.commands[name]
    for inner in getattr(command, "commands", ()):
        yield f"{name} {inner}", command.commands[inner]
    if not hasattr(command, "commands"):
        yield name, command


def _line_of_verb(verb: tuple[str, Any]) -> str:
    path, command = verb
    context = typer.Context(command)
    words, calls_relay = [path], False
    for parameter in command.params:
        if parameter.rich_help_panel == _RELAY_PANEL:
            calls_relay = True
            continue
        record = parameter.get_help_record(context)
        if record is None or record[0] == "--json":
            continue
        word = record[0].partition(", ")[2] or record[0].partition(" <")[0]
        words.append(word if parameter.required else f"[{word}]")
    text = (command.help or "").partition("\n\n")[0]
    relay = " (a relay)" if calls_relay else ""
    return f"- `{' '.join(words)}`{relay}: {' '.join(text.split())}"


# --- HTTP API


def api() -> str:
    """Return a table with a row for each call. /openapi.json has all details."""
    calls = [
        (f"{method.upper()} {path}", operation)
        for path, item in asyncio.run(_openapi())["paths"].items()
        for method, operation in item.items()
    ]
    common = set.intersection(*({*operation["responses"]} for _, operation in calls))
    rows = [
        f"Every call can also answer {', '.join(sorted(common))}.",
        "",
        "| call | needs | does | answers |",
        "| --- | --- | --- | --- |",
    ]
    for call, operation in calls:
        description = operation.get("description", "")
        needs = description.removeprefix("Needs the right ").removesuffix(".") or "–"
        if any("standardWebhooks" in scheme for scheme in operation["security"]):
            needs = "a signature"
        answers = ", ".join(status for status in operation["responses"] if status not in common)
        rows.append(f"| `{call}` | {needs} | {operation['summary']} | {answers} |")
    return "\n".join(rows) + "\n"


async def _openapi() -> dict[str, Any]:
    """Return the OpenAPI description that a server serves."""
    async with (
        Server(ApiSettings(listen="127.0.0.1:0"), SystemClock()) as server,
        aiohttp.ClientSession() as session,
        session.get(f"{server.address}/openapi.json") as answer,
    ):
        return dict(await answer.json())


# --- Slack


def slack() -> str:
    """Return the app's manifest, its scopes, and remedies for Slack's errors."""
    parts = ["## The app's manifest", ""]
    parts += ["`imds-relay schema slack-manifest` prints it. `--answers none` leaves out commands,"]
    parts += ["buttons and every scope but the first.", "", "| scope | what for |", "| --- | --- |"]
    parts += [f"| `{scope}` | {use} |" for scope, use in SCOPES.items()]
    parts += [
        "",
        "## What Slack refuses, and what to do",
        "",
        "| it says | remedy |",
        "| --- | --- |",
    ]
    parts += [f"| `{error}` | {remedy} |" for error, remedy in REMEDIES.items()]
    return "\n".join(parts) + "\n"


def pretty(value: Any, indent: str = "") -> str:
    """Return JSON whose members share a line where they fit."""
    line = json.dumps(value, ensure_ascii=False)
    if not isinstance(value, dict) or len(indent) + len(line) <= 96:
        return line
    inner = f"{indent}  "
    lines = [""]
    for key, part in value.items():
        member = f'"{key}": {pretty(part, inner)},'
        if lines[-1] and len(inner) + len(lines[-1]) + len(member) < 96 and "\n" not in member:
            lines[-1] += f" {member}"
        else:
            lines.append(member)
    return "{" + f"\n{inner}".join(lines).removesuffix(",") + f"\n{indent}}}"


# --- log


def log() -> str:
    """Return a table of the lines about events."""
    rows = ["## Lines about events", ""]
    every = ", ".join(f"`{name}`" for name in EVERY_LINE)
    rows += [f"Each of them has {every}.", ""]
    rows += ["| type | level | fields |", "| --- | --- | --- |"]
    for name, (level, names) in LINES.items():
        text = logging.getLevelName(level).lower()
        text = STATUS_LEVELS if name == "startrequest.failed" else text
        fields = ", ".join(f"`{field}`" for field in names)
        rows.append(f"| `{name}` | {text} | {fields} |")
    return "\n".join(rows) + "\n"
