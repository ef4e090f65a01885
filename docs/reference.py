"""Generates parts of pages as Markdown: configuration, commands, API, log, metrics, Slack app."""

from __future__ import annotations

import ast
import asyncio
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
import orjson
import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from relay.api import ApiSettings
from relay.api.server.http_server import Server
from relay.chat.platforms.slack.api import REMEDIES
from relay.chat.platforms.slack.manifest import SCOPES, manifest
from relay.cli import make_app
from relay.clock import SystemClock
from relay.config import Config, sink_modules
from relay.config.changes import key_needs_restart
from relay.log_fields import field_meanings
from relay.telemetry.lines import EVERY_LINE, LINES
from relay.telemetry.metrics import METRICS

STATUS_LEVELS = "warning; error if Azure answered 400"
"""The level of `startrequest.failed`."""
MARK = "<!-- what follows is written by `make docs` -->\n"


def with_generated_part(page: Path, generated: str) -> str:
    """Return the page with its handwritten part, and the generated part behind the mark."""
    return f"{page.read_text(encoding='utf-8').partition(MARK)[0]}{MARK}\n{generated}"


# --- configuration


def configuration() -> str:
    """Return a table for each section of the YAML document."""
    return "\n".join(_sections("", Config, "The whole document", set()))


def _sections(
    path: str, model: type[BaseModel], title: str, listed: set[type[BaseModel]]
) -> Iterator[str]:
    if model in listed:  # several sections have the same conditions
        return
    listed.add(model)
    yield f"## {f'`{path}`' if path else title}\n"
    if path and model.__doc__:
        yield f"{_first_paragraph(model.__doc__)}\n"
    yield "| key | default | |"
    yield "| --- | --- | --- |"
    for name, field in model.model_fields.items():
        key = field.alias or name
        if key.endswith("_file") and key.removesuffix("_file") in model.model_fields:
            continue
        description = _describe_key(path, name, field, model)
        yield f"| `{key}` | {_default(field, model)} | {description} |"
    yield ""
    for name, field in model.model_fields.items():
        key = f"{path}.{field.alias or name}".removeprefix(".")
        if key == "sinks":
            for kind, module in sink_modules().items():
                yield from _sections(f"sinks (kind: {kind})", module.Settings, kind, listed)
            continue
        for inner in _models(field.annotation):
            yield from _sections(_section_path(key, field, inner), inner, key, listed)


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
    """Return every verb with what its `--help` prints, and the options that many verbs share."""
    shared: dict[str, str] = {}
    verbs = [*_group("imds-relay", typer.main.get_command(make_app()), shared)]
    return "\n".join(["## Options that say which relay\n", *_table(shared), *verbs])


def _group(path: str, group: Any, shared: dict[str, str]) -> Iterator[str]:
    # Typer does not export the types of its click.
    for name, command in group.commands.items():
        if not command.hidden:
            yield from _command(f"{path} {name}", command, shared)
            if hasattr(command, "commands"):
                yield from _group(f"{path} {name}", command, shared)


def _command(path: str, command: Any, shared: dict[str, str]) -> Iterator[str]:
    context = typer.Context(command, info_name=path)
    own: dict[str, str] = {}
    of_relay: dict[str, str] = {}
    for parameter in command.params:
        record = parameter.get_help_record(context)  # None: hidden
        if record is not None:
            panel = parameter.rich_help_panel
            (of_relay if panel == _RELAY_PANEL else own).update([record])
    shared.update(of_relay)
    yield f"## {path}\n"
    yield f"`{command.get_usage(context).removeprefix('Usage: ')}`\n"
    yield f"{(command.help or '').strip()}\n"
    yield from _table(own)
    if of_relay:
        yield "And the [options that say which relay](#options-that-say-which-relay).\n"


def _table(records: Mapping[str, str]) -> list[str]:
    rows = [
        f"| `{name.replace('|', chr(92) + '|')}` | {' '.join(text.split()).replace('<', '&lt;')} |"
        for name, text in records.items()
    ]
    return ["| | |", "| --- | --- |", *rows, ""] if rows else []


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
        *_json(manifest("socket")),
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


def _json(document: Any) -> list[str]:
    return ["```json", orjson.dumps(document, option=orjson.OPT_INDENT_2).decode(), "```"]


# --- metrics


def log() -> str:
    """Return a table of the fields of the log, and one of the lines about events."""
    rows = ["| field | meaning |", "| --- | --- |"]
    rows += [f"| `{name}` | {meaning} |" for name, meaning in field_meanings().items()]
    rows += ["", "## Lines about events", ""]
    every = ", ".join(f"`{name}`" for name in EVERY_LINE)
    rows += [f"Each of them has {every}.", ""]
    rows += ["| type | level | fields |", "| --- | --- | --- |"]
    for name, (level, names) in LINES.items():
        text = logging.getLevelName(level).lower()
        text = STATUS_LEVELS if name == "startrequest.failed" else text
        fields = ", ".join(f"`{field}`" for field in names)
        rows.append(f"| [`{name}`](events.md#{name.replace('.', '')}) | {text} | {fields} |")
    return "\n".join(rows) + "\n"


def metrics() -> str:
    """Return a table of every metric."""
    rows = ["| metric | kind | unit | meaning | labels |", "| --- | --- | --- | --- | --- |"]
    for metric in METRICS:
        labels = "; ".join(f"`{name}`: {meaning}" for name, meaning in metric.labels.items())
        meaning = f"{metric.help} ({metric.only})" if metric.only else metric.help
        rows.append(f"| `{metric.name}` | {metric.kind} | {metric.unit} | {meaning} | {labels} |")
    return "\n".join(rows) + "\n"
