"""A client that speaks to IMDS as Azure wants it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import aiohttp
import pytest


@pytest.fixture
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    """A session that sends ``Metadata: true``, and opens a connection for each call."""
    connector = aiohttp.TCPConnector(force_close=True)
    async with aiohttp.ClientSession(
        headers={"Metadata": "true"}, connector=connector, trust_env=False
    ) as session:
        yield session
