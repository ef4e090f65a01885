"""Finds the members of a family, such as the sinks: modules of its package, and entry points."""

from __future__ import annotations

import importlib
import logging
import pkgutil
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType

from relay.errors import ConfigError

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BrokenPlugin:
    """An entry point that cannot be used."""

    name: str
    problem: str
    """Which plug-in of which package it is, and why it cannot be used."""


def load_members_and_list_broken_plugins(
    family: ModuleType, check: Callable[[str, ModuleType], None] = lambda _name, _module: None
) -> tuple[dict[str, ModuleType], list[BrokenPlugin]]:
    """Return the members of a family by name, and the plug-ins that cannot be used.

    The members are the public modules of the package, and the entry points of the group with the
    name of the package. So an installed package adds a sink with an entry point of the group
    ``relay.sinks`` that names a module. ``check`` raises ConfigError for a module that breaks the
    contract of the family. A member of the package wins over a plug-in with its name. Of two
    plug-ins with one name neither is used: which of them is meant, nobody has said.
    """
    members = {
        module.name: importlib.import_module(f"{family.__name__}.{module.name}")
        for module in pkgutil.iter_modules(family.__path__)
        if not module.name.startswith("_")
    }
    own_names = frozenset(members)
    found = sorted(entry_points(group=family.__name__), key=lambda each: (each.name, each.value))
    broken = []
    for entry_point in found:
        name = entry_point.name
        try:
            _check_name_is_unique(name, own_names, found)
            module = entry_point.load()
            check(name, module)
        except (Exception, SystemExit) as error:  # noqa: BLE001  # foreign code may raise anything
            _log.debug("plug-in %s cannot be used", name, exc_info=True)
            prefix = f"plug-in {name} of {_describe_package(entry_point)} cannot be used:"
            broken.append(BrokenPlugin(name, f"{prefix} {_describe_error(error)}"))
        else:
            members[name] = module
    return members, broken


def _check_name_is_unique(
    name: str, own_names: Collection[str], found: Sequence[EntryPoint]
) -> None:
    if name in own_names:
        raise ConfigError("the relay has a member of its own with this name")
    packages = [_describe_package(entry_point) for entry_point in found if entry_point.name == name]
    if len(packages) > 1:
        raise ConfigError(f"several packages have a plug-in with this name: {', '.join(packages)}")


def _describe_error(error: BaseException) -> str:
    text = (str(error).strip() or "no reason given").splitlines()[0]
    return text if isinstance(error, ConfigError) else f"{type(error).__name__}: {text}"


def _describe_package(entry_point: EntryPoint) -> str:
    package = entry_point.dist
    if package is None:
        return f"the module {entry_point.value}"
    return f"package {package.name} {package.version} (module {entry_point.value})"
