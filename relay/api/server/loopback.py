"""Tells calls of programs on this machine from calls that a proxy or a web page passes on."""

from __future__ import annotations

import ipaddress
import re

from aiohttp import web

_HOST = re.compile(r"(?:\[([^\]]*)\]|([^:]*))(?::[0-9]*)?")
# Proxies add headers like these. X-Forwarded-* and X-Envoy-* have many more.
_PROXY_HEADERS = (
    "forwarded",
    "via",
    "x-real-ip",
    "x-client-ip",
    "x-cluster-client-ip",
    "true-client-ip",
    "cf-connecting-ip",
)
_PROXY_HEADER_PREFIXES = ("x-forwarded", "x-envoy-", "x-original-")


def is_direct_loopback_call(request: web.Request) -> bool:
    """Whether the call names a loopback host and came through no proxy.

    A proxy on this machine serves callers elsewhere. A page of another site can let its own name
    point to this machine, and its visitor's browser then names that host.
    """
    hosts = [_HOST.fullmatch(value) for value in request.headers.getall("Host", [])]
    if len(hosts) != 1 or hosts[0] is None or not _is_loopback_host(*hosts[0].groups("")):
        return False
    names = [name.lower() for name in request.headers]
    return not any(
        name in _PROXY_HEADERS or name.startswith(_PROXY_HEADER_PREFIXES) for name in names
    )


def _is_loopback_host(ipv6: str, name: str) -> bool:
    try:
        return name.lower() == "localhost" or ipaddress.ip_address(ipv6 or name).is_loopback
    except ValueError:  # another name
        return False
