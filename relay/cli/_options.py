"""The arguments and options that several verbs share, as annotated types for typer.

Typer learns the options of a verb from its signature, and the help text from its docstring.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typing_extensions import override

from relay.errors import ConfigError
from relay.files import describe_os_error


def option(name: str, metavar: str | None, text: str, *names: str, **settings: Any) -> Any:
    return typer.Option(name, *names, metavar=metavar, help=text, **settings)


def argument(metavar: str, text: str) -> Any:
    return typer.Argument(metavar=metavar, help=text)


AsJson = Annotated[bool, option("--json", None, "Print JSON for programs.")]
ListAsJson = Annotated[bool, option("--json", None, "With --list: print JSON for programs.")]
AllPages = Annotated[bool, option("--all", None, "Every page, not only the first.")]
EventId = Annotated[
    str,
    argument(
        "EVENT",
        "An EventId or a unique beginning of it; upper and lower case are the same. "
        "On a hub also EVENTID@SCOPE.",
    ),
]
Scope = Annotated[str | None, option("--scope", "SCOPE", "Of a hub: only this scope.")]
Reason = Annotated[str | None, option("--reason", "TEXT", "Recorded for the audit.")]
ConfigFile = Annotated[
    Path | None,
    option(
        "--config",
        "FILE",
        "The configuration file. Default: $IMDS_RELAY_CONFIG, else ./relay.yaml, "
        "else /etc/imds-relay/relay.yaml, else the built-in defaults.",
        "-c",
    ),
]
AZURE_PROCEEDS = (
    "Azure proceeds at NotBefore regardless, and other relays and Azure Resource Manager "
    "can still approve."
)


def read_named_file(option_name: str, file: Path) -> str:
    """Return the text of a file that an option names. Raises ConfigError."""
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = describe_os_error(error) if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(
            f"{option_name}: expected a file that can be read, {file}: {reason}"
        ) from None


def scope_query(scope: str | None) -> dict[str, str]:
    return {} if scope is None else {"scope": scope}


class DefaultGroup(TyperGroup):
    """A group of verbs that means its first verb where none is named."""

    @override
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        is_option = bool(args) and args[0].startswith("-") and args[0] != "--help"
        if (is_option or not args) and not ctx.resilient_parsing:
            for verb in self.commands.keys() & {*args}:
                raise typer.BadParameter(f"expected options behind the verb: {verb} {args[0]}")
            args = [next(iter(self.commands)), *args]
        return super().parse_args(ctx, args)
