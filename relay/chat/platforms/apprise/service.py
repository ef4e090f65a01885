"""One service of the library Apprise: checks its URL, and sends messages to it.

`load_service` refuses a URL that makes the library show a message on this machine, run code, read a
local file, follow redirects or go without TLS. The library has a plugin class for each of
hundreds of kinds of services, so a list in the relay would be out of date. The checks read what
each class says about the parts of its URLs: ``template_tokens`` and ``template_args``, whose
``name`` is a label for people (https://appriseit.com).
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

REQUIREMENT = (
    "expected the package apprise, 2.2 or newer, which can be told to follow no redirects "
    "(requirements/run.lock has it)"
)
_FILE_ARGUMENT = re.compile(r"(\bFile|KeyFile|Template Path|Key Path)$")
"""The library's names for arguments that are files on this machine, which the service would get."""
_LOGGED_STATUS = re.compile(r"\berror=(\d{3})\b")
"""How the library logs an HTTP status. It does not return the status."""


@dataclass(frozen=True, slots=True)
class SendResult:
    """Whether a service accepted a message. ``status`` is its HTTP status, if it is known."""

    accepted: bool
    status: int | None = None


class AppriseService:
    """One service. ``name`` is the kind of service, and contains nothing of the URL."""

    def __init__(self, library: Any, plugin: Any) -> None:
        self.name = str(plugin.service_name)
        self._library = library
        if plugin.overflow_mode == library.OverflowMode.UPSTREAM:
            # Some services refuse a text that is too long.
            plugin.overflow_mode = library.OverflowMode.TRUNCATE
        self._apprise = library.Apprise(asset=plugin.asset)
        self._apprise.add(plugin)

    def send(self, title: str, body: str, message_type: str) -> SendResult:
        """Send a message. Blocks until the service answers."""
        result = self._apprise.notify(
            body=body,
            title=title,
            notify_type=message_type,
            body_format=self._library.NotifyFormat.TEXT,
        )
        if result:
            return SendResult(accepted=True)
        status = None
        for entry in result.logs():
            match = _LOGGED_STATUS.search(entry.message)
            if match is not None:
                status = int(match[1])
        return SendResult(accepted=False, status=status)


def load_service(url: str, *, allow_http: bool) -> AppriseService:
    """Return the service of a URL.

    Raises ValueError, which contains nothing of the URL but its scheme.
    """
    library = _require_library()
    if re.search(r"[\x00-\x1f\x7f]", url):
        raise ValueError("expected a URL without control characters, got one with them")
    parsed = library.plugins.url_to_dict(url)
    if not parsed:
        raise ValueError(
            "expected a URL that Apprise knows, such as gotifys://gotify.example.com/token, "
            "got something else"
        )
    _check_plugin_class(library.plugins.N_MGR[parsed["schema"]], parsed, allow_http=allow_http)
    plugin = library.Apprise.instantiate(url, asset=_make_asset(library))
    if plugin is None:
        raise ValueError(
            f"expected all parts that {parsed['schema']}:// needs, some are missing or wrong"
        )
    _check_switches(plugin)
    return AppriseService(library, plugin)


def _make_asset(library: Any) -> Any:
    """Return the library's options for one service."""
    return library.AppriseAsset(
        app_id="imds-relay",  # the sender that services show
        app_desc="imds-relay",
        http_redirects=False,
        async_mode=False,  # send in the calling thread
        service_timeout=0,  # its own timeout uses a thread pool, which the process waits for
        allow_templates=False,  # the library must not replace ${…} in URLs
        pgp_autogen=False,
        pem_autogen=False,
    )


def _check_plugin_class(kind: Any, parsed: dict[str, Any], *, allow_http: bool) -> None:
    """Raise ValueError for a service that is not on the network or would read local files.

    ``kind`` is the class of the library's plugin. ``parsed`` are the parts of the URL, with
    its query as ``qsd``.
    """
    schema = parsed["schema"]
    if kind.category != "native" or not _is_remote(kind):
        raise ValueError(
            f"expected a service on the network, got {schema}://, which shows messages on this "
            "machine or runs code"
        )
    if not kind.enabled:
        packages = ", ".join(_as_list(kind.requirements["packages_required"]))
        requirement = packages or "something that this system does not have"
        raise ValueError(f"expected a usable service, {schema}:// needs {requirement}")
    for name in sorted({*parsed.get("qsd", {})} & _plugin_class_arguments_naming_local_files(kind)):
        raise ValueError(f"expected a URL that names no file of this machine, got one with {name}=")
    secure = _as_list(kind.secure_protocol)
    if secure and schema not in secure and not allow_http:
        raise ValueError(
            f"expected {secure[0]}://, got {schema}://: set allow_http: true if the network to "
            "the service is trusted"
        )
    address = parse_address_literal(str(parsed.get("host") or "").strip("[]"))
    if address is not None and is_refused(address):
        raise ValueError(
            "expected a service's address, got a metadata or host address, which no sink may reach"
        )


def _is_remote(kind: Any) -> bool:
    """Return whether the URLs of a kind must name a host, an account or a recipient.

    A kind without any of them sends to this machine, such as dbus, macosx or syslog.
    """
    tokens = {name: token for name, token in kind.template_tokens.items() if name != "schema"}
    return "host" in tokens or any(token.get("required") for token in tokens.values())


def _plugin_class_arguments_naming_local_files(kind: Any) -> set[str]:
    """Return the arguments in URLs of a kind that name local files, with their aliases."""
    arguments = {**kind.template_tokens, **kind.template_args}
    names = {
        name
        for name, argument in arguments.items()
        if _FILE_ARGUMENT.search(str(argument.get("name", "")))
    }
    aliases = {
        name
        for name, argument in arguments.items()
        if names.intersection(_as_list(argument.get("alias_of")))
    }
    return names | aliases


def _check_switches(plugin: Any) -> None:
    """Raise ValueError if the URL turns on what the relay must not do.

    These switches follow redirects, skip the check of certificates, hide failures or retry.
    """
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


def _as_list(value: Any) -> list[str]:
    if value is None:
        return []
    return [value] if isinstance(value, str) else list(value)


def _require_library() -> Any:
    """Return the library. Raises ValueError if it is not installed or too old."""
    if find_spec("apprise") is None:
        raise ValueError(f"{REQUIREMENT}; it is not installed")
    library = _import_and_silence_library()
    if not hasattr(library.AppriseAsset, "http_redirects"):
        raise ValueError(f"{REQUIREMENT}; an older one is installed")
    return library


@functools.cache
def _import_and_silence_library() -> Any:
    """Load the library when it is first needed: it takes half a second and 40 MB.

    Silences its log and the log of its HTTP library, which can contain URLs.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its deprecation warnings are for its authors
        library = importlib.import_module("apprise")
        _ = "json" in importlib.import_module("apprise.plugins").N_MGR  # loads all plugins
    for name in ("apprise", "urllib3"):
        logger = logging.getLogger(name)
        logger.propagate = False
        logger.addHandler(logging.NullHandler())
    return library
