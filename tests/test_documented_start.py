"""README.md: its commands bring a newcomer from nothing to an approved event, as printed."""

from __future__ import annotations

import asyncio
import re
import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from tests.cli.command import read_until
from tests.documented import ROOT, block, blocks
from tests.ports import reserve
from tests.programs import output_of, running

PAGE = "README.md"
AZURE, RECEIVER, RELAY, LOOK = blocks(PAGE, "sh", "Try it, without Azure")
EVENT = "602D9444-D2CD-49C7-8624-8643E7171297"


class Clone:
    """A folder with what the commands use: the programs of this clone, and free ports."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.azure, self.receiver, self.api = reserve(3)
        for name in ("examples", "config"):
            (folder / name).symlink_to(ROOT / name)
        for program, module in {"imds-relay": "-m relay", "python": ""}.items():
            self._write(f"bin/{program}", f'#!/bin/sh\nexec "{sys.executable}" {module} "$@"\n')
        self._write("requirements/install", "#!/bin/sh\n")  # make install runs the real one
        self._write(".venv/bin/activate", f'PATH="{folder}/bin:$PATH"\n')

    def _write(self, name: str, text: str) -> None:
        file = self.folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        file.chmod(0o755)

    def bash(self, commands: str) -> tuple[str, ...]:
        """Return what runs commands as a terminal of its own does. Only the ports are changed."""
        here = re.sub(
            r"imds-relay simulate$",
            f"exec imds-relay simulate --port {self.azure}",
            commands.strip(),
        )
        here = re.sub(r"(imds-relay run)$", r"exec \1", here)
        here = re.sub(r"(SECRET=\S+\)) python", r"export \1; exec python", here)
        here = here.replace(":8169", f":{self.azure}").replace(":8000", f":{self.receiver}")
        ports = f"export PORT={self.receiver} IMDS_RELAY_API__LISTEN=127.0.0.1:{self.api}"
        return "bash", "-euc", f"{ports}\n{here}"

    @asynccontextmanager
    async def running(self, commands: str, line: str) -> AsyncIterator[asyncio.StreamReader]:
        """Run commands until a line is printed, and then on until the context ends."""
        all_of_it = asyncio.subprocess.STDOUT
        async with running(*self.bash(commands), cwd=self.folder, stderr=all_of_it) as output:
            await read_until(output, line)
            yield output

    async def run(self, commands: str) -> str:
        """Run commands to their end, and return what they print."""
        command = self.bash(commands)
        return await asyncio.to_thread(output_of, *command, cwd=self.folder)


@pytest.mark.skipif(shutil.which("curl") is None, reason="the commands use curl")
async def test_the_commands_lead_from_nothing_to_an_approved_event(tmp_path: Path) -> None:
    """And `init`, `check` and `doctor` on a VM accept what `init` prints."""
    *verbs, last = block(PAGE, "sh", "On a VM in Azure").splitlines()
    assert last == RELAY.splitlines()[-1]
    source = "IMDS_RELAY_SOURCE__URL=http://127.0.0.1:8169"
    clone = Clone(tmp_path)
    async with (
        clone.running(AZURE, "finds its IMDS at"),
        clone.running(RECEIVER, "waiting for events") as received,
        clone.running(RELAY, "the API listens"),
    ):
        schedule, pause, look = LOOK.partition("sleep 2 ")
        await clone.run(schedule)
        await read_until(received, "event.scheduled")
        output = await clone.run(f". .venv/bin/activate\n{pause}{look}")
        assert "pending, 0 of 1 vote, rule mine" in output
        assert "granted (1 of 1 vote)" in output
        assert output.count(EVENT) >= 2
        key = (tmp_path / "page.key").read_text().strip()
        async with (
            aiohttp.ClientSession(f"http://127.0.0.1:{clone.api}") as browser,
            browser.get("/") as page,
            browser.get("/v1/events", headers={"Authorization": f"Bearer {key}"}) as events,
        ):
            assert "<title>imds-relay</title>" in await page.text()
            assert EVENT in await events.text()
        story = await read_until(received, "event.ended")
        (tmp_path / "relay.yaml").unlink()
        printed = await clone.run(f". .venv/bin/activate\nexport {source}\n" + "\n".join(verbs))
    assert "user-initiated" in printed
    assert "0 failed" in printed
    steps = ["recorded", "granted", "accepted", "started", "ended"]
    assert re.findall(r"(\w+)\.v1 Reboot vm-0\n", story) == steps
