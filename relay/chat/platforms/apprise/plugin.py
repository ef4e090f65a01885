"""One of the services that the library Apprise speaks to: which of its URLs are taken, and what its answers mean.

The library is asked what it knows of each kind of service (`template_tokens`, `template_args` of its plugins, see
https://appriseit.com): the services are hundreds, and a list of our own would be out of date.
"""

from __future__ import annotations

import functools
import importlib
import logging
import re
import warnings
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from relay.net.egress import is_refused, parse_address_literal

NEEDED = "expected the package imds-relay[apprise] with Apprise 2.2 or newer, which can be told to follow no redirects"
_FILE = re.compile(r"(\bFile|KeyFile|Template Path|Key Path)$")
"""How the library calls an argument that names a file on this machine, which the service would be shown."""
_STATUS = re.compile(r"\berror=(\d{3})\b")
"""How the library logs the status of an answer; it returns no more than that something failed."""


@dataclass(frozen=True, slots=True)
class SendResult:
    """What became of one message. ``status``: the service's, where it answered and the library tells."""

    accepted: bool
    status: int | None = None


class ApprisePlugin:
    """One URL. ``name`` says which kind of service it is, and nothing of the URL."""

    def __init__(self, apprise: Any, plugin: Any) -> None:
        self.name = str(plugin.service_name)
        self._library = apprise
        if plugin.overflow_mode == apprise.OverflowMode.UPSTREAM:
            plugin.overflow_mode = (
                apprise.OverflowMode.TRUNCATE
            )  # else what is too long is refused, by some
        self._one = apprise.Apprise(asset=plugin.asset)
        self._one.add(plugin)

    def send(self, title: str, body: str, kind: str) -> SendResult:
        """Send a message. It blocks, for as long as the service likes."""
        result = self._one.notify(
            body=body, title=title, notify_type=kind, body_format=self._library.NotifyFormat.TEXT
        )
        if result:
            return SendResult(accepted=True)
        statuses = [
            int(found[1])
            for entry in result.logs()
            if (found := _STATUS.search(entry.message)) is not None
        ]
        return SendResult(accepted=False, status=statuses[-1] if statuses else None)


def plugin_for(url: str, *, allow_http: bool) -> ApprisePlugin:
    """The service that a URL stands for. Raises ValueError, which holds nothing of the URL but its scheme."""
    apprise = _library()
    if re.search(r"[\x00-\x1f\x7f]", url):
        raise ValueError("expected a URL without control characters, got one with them")
    asset = apprise.AppriseAsset(
        app_id="imds-relay",  # who speaks, where a service shows it
        app_desc="imds-relay",
        http_redirects=False,
        async_mode=False,  # in the calling thread
        service_timeout=0,  # its own is kept by a pool of threads that the process waits for
        allow_templates=False,  # ${…} in a URL is not for the library to fill in
        pgp_autogen=False,
        pem_autogen=False,
    )
    parsed = apprise.plugins.url_to_dict(url)
    if not parsed:
        raise ValueError(
            "expected a URL that Apprise knows, such as gotifys://gotify.example.com/token, got something else"
        )
    _check_kind(apprise.plugins.N_MGR[parsed["schema"]], parsed, allow_http=allow_http)
    plugin = apprise.Apprise.instantiate(url, asset=asset)
    if plugin is None:
        raise ValueError(
            f"expected all that {parsed['schema']}:// needs, some of it is missing or wrong"
        )
    _check_switches(plugin)
    return ApprisePlugin(apprise, plugin)


def _check_kind(kind: Any, parsed: dict[str, Any], *, allow_http: bool) -> None:
    """Raises ValueError for a kind of service that is not out there, or that would read files here."""
    schema = parsed["schema"]
    if kind.category != "native" or not _is_out_there(kind):
        raise ValueError(
            f"expected a service on the network, got {schema}://, which shows messages on this machine or runs code"
        )
    if not kind.enabled:
        packages = kind.requirements["packages_required"]
        needs = (
            ", ".join([packages] if isinstance(packages, str) else packages)
            or "something that this system does not have"
        )
        raise ValueError(f"expected a service that can be used here, {schema}:// needs {needs}")
    for name in sorted({*parsed.get("qsd", {})} & _naming_files(kind)):
        raise ValueError(f"expected a URL that names no file of this machine, got one with {name}=")
    secure = _listed(kind.secure_protocol)
    if secure and schema not in secure and not allow_http:
        raise ValueError(
            f"expected {secure[0]}://, got {schema}://: set allow_http: true where the way to the service is trusted"
        )
    address = parse_address_literal(str(parsed.get("host") or "").strip("[]"))
    if address is not None and is_refused(address):
        raise ValueError(
            "expected a service's address, got a metadata or host address, which no sink may reach"
        )


def _is_out_there(kind: Any) -> bool:
    """Whether its URLs have to say where to or for whom: what needs neither speaks to the machine that it runs on.

    So much is true of dbus, gnome, glib, macosx, windows, syslog and blink1, and of no other.
    """
    tokens = {name: one for name, one in kind.template_tokens.items() if name != "schema"}
    return "host" in tokens or any(one.get("required") for one in tokens.values())


def _naming_files(kind: Any) -> set[str]:
    """The arguments of its URLs that name files of this machine, by all their names."""
    known = {**kind.template_tokens, **kind.template_args}
    names = {name for name, one in known.items() if _FILE.search(str(one.get("name", "")))}
    return names | {name for name, one in known.items() if {*_listed(one.get("alias_of"))} & names}


def _check_switches(plugin: Any) -> None:
    """Raises ValueError for what would make the library send elsewhere, believe anybody, or keep a failure to itself."""
    switches = {
        "redirect=yes": plugin.redirects,
        "verify=no": not plugin.verify_certificate,
        "optional=yes": plugin.optional,
        "retry=": plugin.retry,
    }
    for switch, is_on in switches.items():
        if is_on:
            raise ValueError(
                f"expected a URL without {switch}, which a relay must not do, got one with it"
            )


def _listed(value: Any) -> list[str]:
    if value is None:
        return []
    return [value] if isinstance(value, str) else list(value)


def _library() -> Any:
    """The library. Raises ValueError where it is not installed, or is too old."""
    if find_spec("apprise") is None:
        raise ValueError(f"{NEEDED}; it is not installed")
    apprise = _loaded()
    if not hasattr(apprise.AppriseAsset, "http_redirects"):
        raise ValueError(f"{NEEDED}; an older one is installed")
    return apprise


@functools.cache
def _loaded() -> Any:
    """Load it when it is first needed: with all its services it takes half a second and 40 MB.

    Its log is silenced, and that of what it posts with: URLs can be in them.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what it still uses is for its makers to see
        apprise = importlib.import_module("apprise")
        _ = "json" in importlib.import_module("apprise.plugins").N_MGR  # loads all of them
    for name in ("apprise", "urllib3"):
        log = logging.getLogger(name)
        log.propagate = False
        log.addHandler(logging.NullHandler())
    return apprise
