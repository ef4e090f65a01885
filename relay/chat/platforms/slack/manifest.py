"""The Slack app that the relay needs, as a manifest to make it from, with no more rights than it uses. Pure.

Source: https://docs.slack.dev/reference/app-manifest.
"""

from __future__ import annotations

from typing import Any

COMMAND = "/azmaint"
SCOPES = {
    "chat:write": "posts messages, and edits its own",
    "commands": f"hears {COMMAND}",
    "users:read": "finds out whether a person who answers is a full member, and of which workspace",
}
"""What the bot may do, and what for; an app that only tells and links needs the first alone."""


def manifest(answers: str) -> dict[str, Any]:
    """The app. ``answers``: how clicks and commands reach the relay: ``none``, ``socket`` (Socket Mode), or the URL that Slack calls."""
    url = {} if answers in ("none", "socket") else {"url": answers}
    request_url = {"request_url": answers} if url else {}
    heard = answers != "none"
    command = {
        "command": COMMAND,
        **url,
        "description": "Maintenance that Azure has announced",
        "usage_hint": "list | approve EVENT | hold EVENT why | release EVENT",
        "should_escape": False,
    }
    bot = {"bot_user": {"display_name": "azure-maintenance", "always_online": False}}
    return {
        "display_information": {
            "name": "Azure maintenance",
            "description": "Tells of maintenance that Azure has announced for virtual machines, and takes approvals.",
            "background_color": "#1f3a5f",
        },
        "features": {**bot, **({"slash_commands": [command]} if heard else {})},
        "oauth_config": {"scopes": {"bot": list(SCOPES) if heard else ["chat:write"]}},
        "settings": {
            **({"interactivity": {"is_enabled": True, **request_url}} if heard else {}),
            "org_deploy_enabled": False,
            "socket_mode_enabled": answers == "socket",
            "token_rotation_enabled": False,
        },
    }
