"""Generates parts of pages as Markdown: configuration, commands, API, log, Slack app."""

from __future__ import annotations

import ast
import asyncio
import json
import logging
import re
from collections.abc import Iterator, Mapping
from functools import cache
from inspect import cleandoc, getsource
from itertools import pairwise
from pathlib import Path
from textwrap import dedent
from types import UnionType
from typing import Any, Union, get_args, get_origin

import aiohttp
import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from relay.api.server import Server
from relay.api.settings import ApiSettings
from relay.chat.platforms.slack.api import REMEDIES
from relay.chat.platforms.slack.manifest import SCOPES, manifest
from relay.cli import VERBS, make_app
from relay.clock import SystemClock
from relay.config import Config, sink_modules
from relay.config.changes import key_needs_restart
from relay.events.match import Match
from relay.telemetry.lines import EVERY_LINE, LINES

STATUS_LEVELS = "warning; error if Azure answered 400"
"""The level of `startrequest.failed`."""
MARK = "<!-- what follows is written by `make docs` -->\n"


def with_generated_part(page: Path, generated: str) -> str:
    """Return the page with its handwritten part, and the generated part behind the mark."""
    return f"{page.read_text(encoding='utf-8').partition(MARK)[0]}{MARK}\n{generated}"


# --- configuration


def configuration() -> str:
    """Return a table for each section of the document, with the keys of the sections inside it."""
    lines = ["## The whole document", "", *_HEADER]
    sections: list[str] = []
    told: set[str] = set()
    for name, field in Config.model_fields.items():
        lines.append(_row(name, field, Config, ""))
        if name == "sinks":
            for kind, module in sink_modules().items():
                sections += _section(f"sinks (kind: {kind})", "sinks[]", module.Settings, told)
            continue
        for inner in _models(field.annotation):
            title = _section_path(name, field, inner)
            sections += _section(title, name, inner, told)
    return "\n".join([*lines, "", *sections])


_HEADER = ("| key | default | |", "| --- | --- | --- |")


def _section(title: str, path: str, model: type[BaseModel], told: set[str]) -> Iterator[str]:
    """Yield the table of a section. A row that an earlier kind of sink has is not told again."""
    rows = list(_rows(path, model))
    new = [row for row in rows if row not in told]
    known = [row.split("`")[1] for row in rows if row not in new]
    if path == "sinks[]":
        told.update(rows)
    yield f"## `{title}`\n"
    doc = _first_paragraph(model.__doc__ or "")
    if known:
        doc += f" Also, as above: {', '.join(f'`{name}`' for name in known)}."
    yield f"{doc}\n"
    yield from (*_HEADER, *new, "")


def _rows(path: str, model: type[BaseModel], inside: str = "") -> Iterator[str]:
    """Yield a row for each key, and below it those of the sections inside it."""
    for name, field in model.model_fields.items():
        key = field.alias or name
        if key.endswith("_file") and key.removesuffix("_file") in model.model_fields:
            continue
        yield _row(f"{inside}{key}", field, model, path)
        if name == "match":
            continue  # told once, in the handwritten part
        for inner in _models(field.annotation):
            below = f"{inside}{key}[]" if _is_list(field.annotation) else f"{inside}{key}"
            yield from _rows(path, inner, f"{below}.")


def _row(key: str, field: FieldInfo, model: type[BaseModel], path: str) -> str:
    name = next(each for each, its in model.model_fields.items() if its is field)
    description = _describe_key(f"{path}.{key.rpartition('.')[0]}".strip("."), name, field, model)
    return f"| `{key}` | {_default(field, model)} | {description} |"


def _describe_key(path: str, name: str, field: FieldInfo, model: type[BaseModel]) -> str:
    key = field.alias or name
    description = _first_paragraph(_docstrings(model).get(name, ""))
    if f"{name}_file" in model.model_fields:
        description += f" Or `{key}_file`."
    # A role of the fleet is no part of the path.
    if key_needs_restart(re.sub(r" \(.*?\)|\[\]", "", f"{path}.{key}".removeprefix("."))):
        description += " **A change needs a restart.**"
    return description.strip()


@cache
def _docstrings(model: type[BaseModel]) -> dict[str, str]:
    """Return the texts below the fields of a section and of the sections that it extends.

    Pydantic can read them, but does so at each start of the relay, a tenth of its CPU time.
    """
    found: dict[str, str] = {}
    for part in reversed([part for part in model.__mro__ if part.__module__.startswith("relay.")]):
        (definition,) = ast.parse(dedent(getsource(part))).body
        assert isinstance(definition, ast.ClassDef)  # noqa: S101  # the source of a class
        for field, text in pairwise(definition.body):
            match field, text:
                case (
                    ast.AnnAssign(target=ast.Name(name)),
                    ast.Expr(value=ast.Constant(value=str() as said)),
                ):
                    found[name] = cleandoc(said)
    return found


def _section_path(key: str, field: FieldInfo, model: type[BaseModel]) -> str:
    path = f"{key}[]" if _is_list(field.annotation) else key
    if "role" in model.model_fields:
        (role,) = get_args(model.model_fields["role"].annotation)
        path += f" (role: {role})"
    return path


def _first_paragraph(docstring: str) -> str:
    """Return the first paragraph on one line, as Markdown: `<name>` alone would be an HTML tag."""
    return " ".join(docstring.partition("\n\n")[0].split()).replace("<", "&lt;")


def _models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for inner in get_args(annotation) for model in _models(inner)]


def _is_list(annotation: Any) -> bool:
    if get_origin(annotation) in (Union, UnionType):
        return any(_is_list(inner) for inner in get_args(annotation))
    return get_origin(annotation) is tuple


def _default(field: FieldInfo, model: type[BaseModel]) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True, validated_data={})
    if isinstance(value, Match):
        return "[all](#conditions)"
    if isinstance(value, BaseModel):
        return "see below" if type(value) is not model else ""
    if value is None:
        return "`null`"
    if isinstance(value, float):
        return f"`{_duration(value)}`"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, tuple):
        return "`" + str(list(value)).replace("'", '"') + "`"
    if isinstance(value, Mapping):
        return "`{}`"
    return f"`{value}`"


def _duration(seconds: float) -> str:
    if seconds == float("inf"):
        return "no limit"
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60), ("s", 1)):
        if seconds >= size and seconds % size == 0 and not (unit == "d" and seconds == size):
            return f"{seconds / size:g}{unit}"
    return f"{seconds * 1000:g}ms" if seconds else "0s"


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
    parts = [
        "## The app's manifest",
        "",
        "As `imds-relay schema slack-manifest` prints it:",
        "",
        "```json",
        pretty(manifest("socket")),
        "```",
    ]
    parts += [
        "",
        "`--answers none` leaves out commands, buttons and every scope but the first.",
        "",
        "| scope | what for |",
        "| --- | --- |",
    ]
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
        rows.append(f"| [`{name}`](events.md#{name.replace('.', '')}) | {text} | {fields} |")
    return "\n".join(rows) + "\n"
