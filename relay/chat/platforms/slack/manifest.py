"""The manifest of the Slack app that the relay needs, with no scope that it does not use. Pure.

``imds-relay schema slack-manifest`` prints it for whoever makes the app at Slack. The generated
pages of the documentation contain it, too. A running relay does not use it. Source:
https://docs.slack.dev/reference/app-manifest.
"""

from __future__ import annotations

from typing import Any

COMMAND = "/azmaint"
SCOPES = {
    "chat:write": "post messages and edit the app's own messages",
    "commands": f"receive {COMMAND}",
    "users:read": "check that a person who answers is a full member, and of which workspace",
}
"""The bot's scopes and their use. An app that takes no answers needs only the first scope."""


def manifest(answers: str) -> dict[str, Any]:
    """Return the manifest as JSON values.

    ``answers`` says how clicks and commands reach the relay: ``none``, or ``socket`` (Socket Mode).
    """
    takes_answers = answers == "socket"
    features: dict[str, Any] = {
        "bot_user": {"display_name": "azure-maintenance", "always_online": False}
    }
    settings: dict[str, Any] = {}
    if takes_answers:
        features["slash_commands"] = [
            {
                "command": COMMAND,
                "description": "Maintenance that Azure has announced",
                "usage_hint": "list | EVENT",
                "should_escape": False,
            }
        ]
        settings["interactivity"] = {"is_enabled": True}
    return {
        "display_information": {
            "name": "Azure maintenance",
            "description": "Shows maintenance that Azure has announced for virtual machines, "
            "and takes approvals.",
            "background_color": "#1f3a5f",
        },
        "features": features,
        "oauth_config": {"scopes": {"bot": list(SCOPES) if takes_answers else ["chat:write"]}},
        "settings": {
            **settings,
            "org_deploy_enabled": False,
            "socket_mode_enabled": takes_answers,
            "token_rotation_enabled": False,
        },
    }
