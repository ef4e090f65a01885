"""``init``: a configuration to begin with."""

from __future__ import annotations

import re

from relay.config import DEFAULTS

_NO_RULES = re.compile(r"^  rules: \[\](?P<comment> +#.*)\n", re.MULTILINE)
_USER_EVENTS = """\
    # Polling makes Azure wait up to 15 minutes for approval of each reboot that a user starts: this rule approves them at once.
    - name: user-initiated
      match: {event_source: [User]}
      approve: automatic
"""


def init() -> None:
    """Print a configuration to begin with, for relay.yaml.

    It holds every setting with its default and what it is for, the rule for reboots that users start, and examples.
    """
    print(beginning(), end="")  # noqa: T201  # as it stands in the file


def beginning() -> str:
    """The annotated defaults with the rule for user-started events."""
    defaults = DEFAULTS.read_text(encoding="utf-8")
    text, count = _NO_RULES.subn(
        lambda found: f"  rules:   {found['comment']}\n{_USER_EVENTS}", defaults
    )
    assert count == 1  # noqa: S101  # a test keeps the file as it has to be
    return text
