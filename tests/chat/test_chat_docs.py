"""The documentation pages about Teams and Apprise show valid sections and real texts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from relay.chat.cards.event_card import event_card
from relay.chat.platforms.apprise import Services, Settings
from relay.config import Config
from tests.approvals.builders import build_event, build_status
from tests.chat.apprise_server import apprise_url, running_service
from tests.chat.teams_server import PATH, QUERY

PAGES = Path(__file__).parents[2] / "docs" / "chat"


@pytest.mark.parametrize(
    ("page", "secret"),
    [
        pytest.param("teams", f"https://teams.example{PATH}{QUERY}", id="teams"),
        pytest.param("apprise", "ntfys://ntfy.example.com/topic", id="apprise"),
    ],
)
def test_the_section_on_a_page_is_valid(page: str, secret: str, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text(secret)
    (section,) = re.findall(r"```yaml\n(.*?)```", (PAGES / f"{page}.md").read_text(), re.DOTALL)
    with_secret_file = re.sub(r"(_file: )\S+", rf"\g<1>{tmp_path / 'secret'}", section)
    (sink,) = Config.model_validate(YAML(typ="safe").load(with_secret_file)).sinks
    assert getattr(sink, "kind", None) == page


async def test_the_message_on_the_apprise_page_is_what_a_service_gets() -> None:
    reboot = build_event(
        "6F83E8DA-3EB4-4B0A-BFCA-0932494392AD",
        resources=("db-1", "db-2"),
        description="Host server is undergoing maintenance.",
    )
    card = event_card(build_status(reboot), link=lambda *_: None, code=None)
    async with running_service() as receiver:
        settings = Settings.model_validate(
            {
                "kind": "apprise",
                "name": "p",
                "urls": [apprise_url(receiver.port)],
                "allow_http": True,
            }
        )
        await Services(settings).post(card)
        title, _, body = receiver.messages[0].partition("\n")
    assert f"```text\n{title}\n\n{body}\n```" in re.sub(
        r"(?m)^   ", "", (PAGES / "apprise.md").read_text()
    )


@pytest.mark.parametrize("page", ["teams", "apprise", "README"])
def test_the_links_of_a_page_lead_to_files(page: str) -> None:
    """Pictures are small, so that pages load and clones stay small."""
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", (PAGES / f"{page}.md").read_text())
    files = [PAGES / link for link in links if "://" not in link]
    assert [str(file) for file in files if not file.exists()] == []
    assert all(file.stat().st_size < 60_000 for file in files if file.suffix == ".png")
