"""``init``: prints a configuration file to start from."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from relay.config import AGENT_EXAMPLE, DEFAULTS

ForAgent = Annotated[bool, typer.Option("--agent", help="For an agent of a fleet: short.")]

_EMPTY_RULES = re.compile(r"^  rules: \[\](?P<comment> +#.*)\n", re.MULTILINE)
_RULE_FOR_USER_EVENTS = """\
    # Polling makes Azure wait up to 15 minutes for approval of each reboot that a user starts.
    # This rule approves them at once.
    - name: user-initiated
      match: {event_source: [User]}
      approve: automatic
"""


def init(*, agent: ForAgent = False) -> None:
    """Print a configuration to start from, for relay.yaml.

    It holds every setting with its default and its purpose, examples, and the rule for reboots
    that users start. With --agent it holds what the agent of a fleet needs.
    """
    text = agent_configuration() if agent else initial_configuration()
    print(text, end="")  # noqa: T201  # the output of the command


def initial_configuration() -> str:
    """Return the annotated defaults with the rule for events that users start."""
    defaults = DEFAULTS.read_text(encoding="utf-8")
    text, count = _EMPTY_RULES.subn(
        lambda match: f"  rules:   {match['comment']}\n{_RULE_FOR_USER_EVENTS}", defaults
    )
    assert count == 1  # noqa: S101  # the packaged file has this line; a test checks it
    return text


def agent_configuration() -> str:
    """Return the annotated configuration of an agent."""
    return AGENT_EXAMPLE.read_text(encoding="utf-8")
