"""The kinds of sinks and chat platforms: those of the relay, and those of installed packages.

A kind is a module with a class ``Settings``, which is its section of the configuration, and a
function ``connect``, which makes the sink from it. docs/adding-a-sink.md has this contract. The
configuration needs every kind to validate the section ``sinks``, and the roles to connect them.
"""

from __future__ import annotations

import functools
import importlib
import logging
import pkgutil
from collections.abc import Collection, Sequence
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType
from typing import Any, NamedTuple, get_args

from relay import sinks
from relay.approvals.principals import declare_chat_principal_form
from relay.chat import ChatSettings, platforms
from relay.errors import ConfigError
from relay.sinks import SinkSettings

_log = logging.getLogger(__name__)


class SinkKinds(NamedTuple):
    """The module of each kind of sink and chat platform, and why some plug-ins cannot be used."""

    modules: dict[str, Any]
    broken: Sequence[tuple[str, str]]


@functools.cache
def load_kinds() -> SinkKinds:
    """Import the modules of all kinds. A plug-in that cannot be used stops nobody else.

    That declares the principals of the chat platforms, so that rules can name them.

    The kinds of the relay are the public modules of `relay.chat.platforms` and `relay.sinks`. An
    installed package adds one with an entry point of the group with the name of that package, which
    names a module. Of two plug-ins with one name neither is used: which of them is meant, nobody
    has said.
    """
    own = {
        module.name: importlib.import_module(f"{family.__name__}.{module.name}")
        for family in (sinks, platforms)  # texts name the sinks first
        for module in pkgutil.iter_modules(family.__path__)
        if not module.name.startswith("_")
    }
    for module in own.values():  # before the plug-ins: a prefix belongs to the first
        _declare_principals(module.Settings)
    plugins: dict[str, Any] = {}
    broken: list[tuple[str, str]] = []
    for family, base in ((platforms, ChatSettings), (sinks, SinkSettings)):
        found = sorted(
            entry_points(group=family.__name__), key=lambda each: (each.name, each.value)
        )
        for entry_point in found:
            name = entry_point.name
            try:
                _check_name_is_unique(name, own, plugins, found)
                plugin = entry_point.load()
                _check_module_contract(name, plugin, base)
            except (Exception, SystemExit) as error:  # noqa: BLE001  # foreign code may raise anything
                _log.debug("plug-in %s cannot be used", name, exc_info=True)
                reason = (str(error).strip() or "no reason given").splitlines()[0]
                kind = "" if isinstance(error, ConfigError) else f"{type(error).__name__}: "
                package = _describe_package(entry_point)
                broken.append((name, f"plug-in {name} of {package} cannot be used: {kind}{reason}"))
            else:
                plugins[name] = plugin
    return SinkKinds(own | plugins, broken)


def _declare_principals(settings: type[SinkSettings]) -> None:
    if issubclass(settings, ChatSettings) and settings.principals is not None:
        declare_chat_principal_form(settings.principals)


def _check_module_contract(name: str, module: ModuleType, base: type[SinkSettings]) -> None:
    settings = getattr(module, "Settings", None)
    if not (isinstance(settings, type) and issubclass(settings, base)):
        raise ConfigError(f"expected a class Settings that is a subclass of {base.__name__}")
    settings.model_rebuild()  # raises for annotations that cannot be resolved
    if get_args(settings.model_fields["kind"].annotation) != (name,):
        raise ConfigError(f'expected kind: Literal["{name}"] in its Settings')
    if not callable(getattr(module, "connect", None)):
        raise ConfigError("expected a function connect")
    _declare_principals(settings)  # raises for principals that are those of others


def _check_name_is_unique(
    name: str, own: Collection[str], plugins: Collection[str], found: Sequence[EntryPoint]
) -> None:
    if name in own:
        raise ConfigError("the relay has a member of its own with this name")
    packages = [_describe_package(each) for each in found if each.name == name]
    if len(packages) > 1:
        raise ConfigError(f"several packages have a plug-in with this name: {', '.join(packages)}")
    if name in plugins:
        raise ConfigError("there is a chat platform with this name")


def _describe_package(entry_point: EntryPoint) -> str:
    package = entry_point.dist
    if package is None:
        return f"the module {entry_point.value}"
    return f"package {package.name} {package.version} (module {entry_point.value})"
