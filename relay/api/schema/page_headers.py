"""The headers of the pages for browsers: a page runs its own scripts and loads nothing else."""

from __future__ import annotations

from collections.abc import Mapping


def page_headers(*, script_source: str, style_source: str) -> Mapping[str, str]:
    """Return the headers of a page. The sources are source expressions of CSP.

    Trusted types keep the page's own scripts from inserting text as markup.
    """
    policy = (
        "default-src 'none'",
        f"script-src {script_source}",
        f"style-src {style_source}",
        "img-src data:",  # the page's icon; without one, browsers ask for /favicon.ico
        "connect-src 'self'",
        "form-action 'none'",
        "base-uri 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
    return {
        "Content-Security-Policy": "; ".join(policy),
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Permissions-Policy": "camera=(), display-capture=(), geolocation=(), microphone=(), "
        "payment=(), usb=()",
        "Referrer-Policy": "no-referrer",
        "X-Frame-Options": "DENY",
        "X-Robots-Tag": "noindex, nofollow",
    }
