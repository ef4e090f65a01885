"""What the pages about Teams and Apprise show is so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from relay.chat.cards.rendering import event_card
from relay.chat.platforms.apprise.fanout import ServiceFanout
from relay.chat.platforms.apprise.settings import Settings
from relay.config import Config
from tests.approvals.builders import build_event, build_status
from tests.chat.apprise_server import service, url_of
from tests.chat.teams_server import PATH, QUERY

PAGES = Path(__file__).parents[2] / "docs" / "chat"


@pytest.mark.parametrize(
    ("page", "text"),
    [
        ("teams", f"https://teams.example{PATH}{QUERY}"),
        ("apprise", "ntfys://ntfy.example.com/topic"),
    ],
)
def test_the_section_that_a_page_shows_works(page: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text(text)
    (section,) = re.findall(r"```yaml\n(.*?)```", (PAGES / f"{page}.md").read_text(), re.DOTALL)
    shown = re.sub(r"(_file: )\S+", rf"\g<1>{tmp_path / 'secret'}", section)
    (sink,) = Config.model_validate(YAML(typ="safe").load(shown)).sinks
    assert getattr(sink, "kind", None) == page


async def test_the_text_that_the_page_shows_is_what_a_service_gets() -> None:

    reboot = build_event(
        "6F83E8DA-3EB4-4B0A-BFCA-0932494392AD",
        resources=("db-1", "db-2"),
        description="Host server is undergoing maintenance.",
    )
    card = event_card(build_status(reboot), "prod", link=lambda *_: None, code=None)
    async with service() as there:
        given = Settings.model_validate(
            {"kind": "apprise", "name": "p", "urls": [url_of(there.port)], "allow_http": True}
        )
        await ServiceFanout(given).post(card)
        title, _, body = there.messages[0].partition("\n")
    assert f"```text\n{title}\n\n{body}\n```" in re.sub(
        r"(?m)^   ", "", (PAGES / "apprise.md").read_text()
    )


@pytest.mark.parametrize("page", ["teams", "apprise", "README"])
def test_what_a_page_leads_to_is_there(page: str) -> None:
    """Pictures are small: nobody waits for them, and a clone stays light."""
    leads = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", (PAGES / f"{page}.md").read_text())
    inside = [PAGES / one for one in leads if "://" not in one]
    assert [str(one) for one in inside if not one.exists()] == []
    assert all(one.stat().st_size < 60_000 for one in inside if one.suffix == ".png")
