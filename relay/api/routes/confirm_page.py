"""`GET /approve`: the page behind the links in chat messages.

The page is the same for all links and decides nothing. The link's token is in the fragment, which
browsers do not send. The page calls `relay.api.routes.confirmations`.
"""

from __future__ import annotations

import base64
import hashlib
from importlib import resources

from aiohttp import web

from relay.api.schema.page_headers import page_headers
from relay.api.schema.responses import bytes_response
from relay.api.schema.route import Call, Route

_PAGE = resources.files("relay.api.routes").joinpath("confirm_page.html").read_bytes()


def _inline_hash(tag: str) -> str:
    """Return the source expression for the page's only element of this kind.

    Source: https://www.w3.org/TR/CSP3/, section 2.3.1.
    """
    _, _, rest = _PAGE.partition(f"<{tag}>".encode())
    content, _, _ = rest.partition(f"</{tag}>".encode())
    return f"sha256-{base64.b64encode(hashlib.sha256(content).digest()).decode()}"


# The page may run its own script and style, and call this relay.
_HEADERS = page_headers(
    script_source=f"'{_inline_hash('script')}'", style_source=f"'{_inline_hash('style')}'"
)


async def _show_page(_call: Call) -> web.Response:
    return bytes_response(200, _PAGE, "text/html; charset=utf-8", _HEADERS)


ROUTES = (
    Route(
        method="GET",
        path="/approve",
        summary="the page behind the links in messages; "
        "the link's token is in the fragment, which browsers do not send",
        handler=_show_page,
        access="public",
        media_types=("text/html",),
    ),
)
