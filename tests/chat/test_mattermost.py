"""Mattermost through the whole relay: links where nobody decides in the chat, and names."""

from __future__ import annotations

import re
from pathlib import Path

from tests.chat.mattermost_server import PUBLIC_URL, button_labels, post_text, running_mattermost
from tests.chat.running_relay import rule, stage
from tests.eventually import eventually


async def test_a_post_has_links_and_names_and_mentions_nobody(tmp_path: Path) -> None:
    """The links are in the text, because Mattermost's buttons open no pages."""
    async with running_mattermost() as server:
        carol = server.principal(server.add_user("carol_x"))
        unknown = server.principal("z" * 26)
        approvals = {
            "rules": [rule(1, carol, unknown, "group:dbas")],
            "groups": {"dbas": ["client:alice"]},
        }
        async with stage(tmp_path, [server.sink_section()], approvals=approvals) as relay:
            event = relay.reboot()
            await eventually(lambda: bool(server.channel_posts))
        post = server.channel_posts[0]
    text = post_text(post)
    assert f"Azure begins at {event.not_before:%Y-%m-%d %H:%M:%S} UTC or soon after" in text
    assert "missing, from `client:alice`, " in text
    assert "**carol_x**" in text
    assert f"`{unknown}`" in text
    assert "@" not in text
    assert button_labels(post) == []
    link = rf"\({PUBLIC_URL}/[^)]+\)"
    attachment = post["props"]["attachments"][0]["text"]
    assert re.search(rf"\*\*\[Approve\]{link}\*\* · \*\*\[Hold\]{link}\*\*", attachment)
