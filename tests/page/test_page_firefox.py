"""The page in Firefox: it shows, follows, and takes a decision."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import firefox
from tests.api.running_relay import RunningRelay, make_event
from tests.page.scenes import page_url

ENTER = """
document.getElementById('key').value = 'bearer-test-key-of-alice';
document.querySelector('#enter [type=submit]').click()"""


@pytest.mark.skipif(firefox.executable() is None, reason="there is no Firefox")
async def test_the_page_works_in_firefox(relay: RunningRelay, tmp_path: Path) -> None:
    program = firefox.executable()
    assert program is not None
    async with firefox.open_firefox(program, tmp_path) as tab:
        await tab.open(page_url(relay))
        await tab.wait_for("document.activeElement.id === 'key'")
        await tab.run(ENTER)
        await tab.wait_for("document.getElementById('live').textContent === 'Live'")
        await tab.wait_for("document.querySelectorAll('.event').length === 1")
        await relay.observe(make_event(), make_event(event_id="E-2", resources=("db-1",)))
        await tab.wait_for("document.querySelectorAll('.event').length === 2")
        await tab.run("document.querySelector('[aria-label^=\"Hold: Reboot of West\"]').click()")
        await tab.wait_for("document.querySelector('#decide-notices p')")
        await tab.run("document.getElementById('decide-do').click()")
        await tab.wait_for("/It is on hold/.test(document.querySelector('dialog').textContent)")
        await tab.run("document.querySelector('dialog button').click()")
        await tab.wait_for("document.querySelector('.event.held h2 a')")
        await tab.run("document.querySelector('.event.held h2 a').click()")
        await tab.wait_for("document.querySelector('.timeline .bar.held')")
        (hold,) = await relay.recorded_events("approval.recorded")
        assert (hold["data"]["decision"], hold["data"]["principal"]) == ("hold", "client:alice")
        assert await tab.run("document.documentElement.scrollWidth <= innerWidth")
        assert tab.log == []
