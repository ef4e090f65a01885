"""The pages that repeat code: the configuration, the command line, the HTTP API and the Slack app, as Markdown."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin

import aiohttp
import orjson
import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from relay.api import ApiSettings
from relay.api.server.http_server import Server
from relay.chat.platforms.slack.manifest import SCOPES, manifest
from relay.chat.platforms.slack.web import REMEDIES
from relay.cli import app
from relay.clock import SystemClock
from relay.config import Config, sink_modules

MARK = "<!-- what follows is written by `make docs` -->\n"


def with_mark(page: Path, generated: str) -> str:
    """The part of a page that is written by hand, and behind the mark the generated one."""
    return f"{page.read_text(encoding='utf-8').partition(MARK)[0]}{MARK}\n{generated}"


# --- configuration


def configuration() -> str:
    """A table for each section of the YAML document."""
    return "\n".join(_sections("", Config, "The whole document", set()))


def _sections(
    path: str, model: type[BaseModel], title: str, seen: set[type[BaseModel]]
) -> Iterator[str]:
    if model in seen:  # the conditions of rules are those of sinks
        return
    seen.add(model)
    yield f"## {f'`{path}`' if path else title}\n"
    if path and model.__doc__:
        yield f"{model.__doc__.splitlines()[0]}\n"
    yield "| key | default | |"
    yield "| --- | --- | --- |"
    for name, field in model.model_fields.items():
        key = field.alias or name
        if key.endswith("_file") and key.removesuffix("_file") in model.model_fields:
            continue
        file = f" Or `{key}_file`." if f"{name}_file" in model.model_fields else ""
        yield f"| `{key}` | {_default(field, model)} | {(field.description or '').splitlines()[0] if field.description else ''}{file} |"
    yield ""
    for name, field in model.model_fields.items():
        key = f"{path}.{field.alias or name}".removeprefix(".")
        if key == "sinks":
            for kind, member in sink_modules().items():
                yield from _sections(f"sinks (kind: {kind})", member.Settings, kind, seen)
            continue
        for inner in _models(field.annotation):
            yield from _sections(
                f"{key}[]" if _is_list(field.annotation) else key, inner, key, seen
            )


def _models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [found for inner in get_args(annotation) for found in _models(inner)]


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
    if isinstance(value, tuple | Mapping):
        return (
            "`" + (str(list(value)).replace("'", '"') if isinstance(value, tuple) else "{}") + "`"
        )
    return f"`{value}`"


def _duration(seconds: float) -> str:
    if seconds == float("inf"):
        return "no limit"
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60), ("s", 1)):
        if seconds >= size and seconds % size == 0 and not (unit == "d" and seconds == size):
            return f"{seconds / size:g}{unit}"
    return f"{seconds * 1000:g}ms" if seconds else "0s"


# --- command line


def commands() -> str:
    """Every verb with its arguments and options."""
    return "\n".join(_group("imds-relay", typer.main.get_command(app)))


def _group(path: str, group: Any) -> Iterator[str]:
    # Any: typer brings a click of its own, whose types it does not export.
    for name, command in group.commands.items():
        if not command.hidden:
            yield from _command(f"{path} {name}", command)
            if hasattr(command, "commands"):
                yield from _group(f"{path} {name}", command)


def _command(path: str, command: Any) -> Iterator[str]:
    arguments = [
        (one.name or "").upper() for one in command.params if one.param_type_name == "argument"
    ]
    yield f"## {path}\n"
    yield f"`{' '.join((path, *arguments))}`\n"
    yield f"{(command.help or '').strip()}\n"
    options = [one for one in command.params if one.param_type_name == "option" and not one.hidden]
    if options:
        yield "| option | |"
        yield "| --- | --- |"
        for option in options:
            yield f"| `{', '.join((*option.opts, *option.secondary_opts))}` | {(option.help or '').strip()} |"
        yield ""


# --- HTTP API


def api() -> str:
    """A line for each call; the whole of it is /openapi.json."""
    rows = ["| call | needs | does | answers |", "| --- | --- | --- | --- |"]
    for path, item in asyncio.run(_described())["paths"].items():
        for method, operation in item.items():
            needs = (
                operation.get("description", "").removeprefix("Needs the right ").removesuffix(".")
            )
            signed = any("standardWebhooks" in one for one in operation["security"])
            answers = ", ".join(operation["responses"])
            rows.append(
                f"| `{method.upper()} {path}` | {'a signature' if signed else needs or '–'} | {operation['summary']} | {answers} |"
            )
    return "\n".join(rows) + "\n"


async def _described() -> dict[str, Any]:
    """What a server says of itself."""
    async with (
        Server(ApiSettings(listen="127.0.0.1:0"), SystemClock()) as server,
        aiohttp.ClientSession() as session,
        session.get(f"{server.address}/openapi.json") as answer,
    ):
        return dict(await answer.json())


# --- Slack


def slack() -> str:
    """The app's manifest in its two forms, what its scopes are for, and what to do about Slack's refusals."""
    url = "https://relay.example.com/v1/chat/slack-ops"
    parts = [
        "## The app's manifest",
        "",
        "For Socket Mode, as `imds-relay schema slack-manifest` prints it:",
        "",
        *_json(manifest("socket")),
    ]
    parts += [
        "",
        f"For calls of Slack to the relay, `imds-relay schema slack-manifest --answers {url}`:",
        "",
        *_json(manifest(url)),
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
    parts += [f"| `{word}` | {remedy} |" for word, remedy in REMEDIES.items()]
    return "\n".join(parts) + "\n"


def _json(document: Any) -> list[str]:
    return ["```json", orjson.dumps(document, option=orjson.OPT_INDENT_2).decode(), "```"]
