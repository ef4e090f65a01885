"""``init``: prints a configuration file to start from."""

from __future__ import annotations

import re

from relay.config import DEFAULTS

_EMPTY_RULES = re.compile(r"^  rules: \[\](?P<comment> +#.*)\n", re.MULTILINE)
_RULE_FOR_USER_EVENTS = """\
    # Polling makes Azure wait up to 15 minutes for approval of each reboot that a user starts.
    # This rule approves them at once.
    - name: user-initiated
      match: {event_source: [User]}
      approve: automatic
"""


def init() -> None:
    """Print a configuration to start from, for relay.yaml.

    It holds every setting with its default and its purpose, examples, and the rule for reboots
    that users start.
    """
    print(initial_configuration(), end="")  # noqa: T201  # the output of the command


def initial_configuration() -> str:
    """Return the annotated defaults with the rule for events that users start."""
    defaults = DEFAULTS.read_text(encoding="utf-8")
    text, count = _EMPTY_RULES.subn(
        lambda match: f"  rules:   {match['comment']}\n{_RULE_FOR_USER_EVENTS}", defaults
    )
    assert count == 1  # noqa: S101  # the packaged file has this line; a test checks it
    return text
