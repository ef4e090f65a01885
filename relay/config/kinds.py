"""The kinds of sinks and chat platforms: those of the relay, and those of installed packages.

A kind is a module with a class ``Settings``, which is its section of the configuration, and a
function ``connect``, which makes the sink from it. docs/adding-a-sink.md has this contract. The
configuration needs every kind to validate the section ``sinks``, and the roles to connect them.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from types import ModuleType
from typing import Any, get_args

from relay import plugins, sinks
from relay.approvals.principals import declare_chat_principal_form
from relay.chat import ChatSettings, platforms
from relay.errors import ConfigError
from relay.plugins import BrokenPlugin
from relay.sinks import SinkSettings


@dataclass(frozen=True, slots=True)
class SinkKinds:
    """The module of each kind, and the plug-ins that cannot be used."""

    modules: dict[str, Any]
    broken: tuple[BrokenPlugin, ...]


def sink_modules() -> dict[str, Any]:
    """Return the module of each kind of sink and of chat platform, by kind.

    The first call also declares the principals of the chat platforms, so that rules can name them.
    """
    return load_kinds().modules


@functools.cache
def load_kinds() -> SinkKinds:
    """Import the modules of all kinds. A plug-in that cannot be used stops nobody else."""
    platform_modules, broken_platforms = plugins.load_members_and_list_broken_plugins(
        platforms, _check_and_declare_chat_platform
    )

    def check_sink(name: str, module: ModuleType) -> None:
        if name in platform_modules:
            raise ConfigError("there is a chat platform with this name")
        _check_module_contract(name, module, SinkSettings)

    sink_plugins, broken_sinks = plugins.load_members_and_list_broken_plugins(sinks, check_sink)
    for platform in platform_modules.values():  # those of the relay too, which need no check
        _declare_principal_form_of_module(platform)
    modules = {**sink_plugins, **platform_modules}
    return SinkKinds(modules, (*broken_sinks, *broken_platforms))


def _check_and_declare_chat_platform(name: str, module: ModuleType) -> None:
    _check_module_contract(name, module, ChatSettings)
    _declare_principal_form_of_module(module)  # raises for principals that are those of others


def _declare_principal_form_of_module(module: ModuleType) -> None:
    if module.Settings.principals is not None:
        declare_chat_principal_form(module.Settings.principals)


def _check_module_contract(name: str, module: ModuleType, base: type[SinkSettings]) -> None:
    """Raise ConfigError for a module that does not keep the contract of its family."""
    settings = getattr(module, "Settings", None)
    if not (isinstance(settings, type) and issubclass(settings, base)):
        raise ConfigError(f"expected a class Settings that is a subclass of {base.__name__}")
    settings.model_rebuild()  # raises for annotations that cannot be resolved
    if get_args(settings.model_fields["kind"].annotation) != (name,):
        raise ConfigError(f'expected kind: Literal["{name}"] in its Settings')
    if not callable(getattr(module, "connect", None)):
        raise ConfigError("expected a function connect")
