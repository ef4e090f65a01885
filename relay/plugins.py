"""The folder is the registry: finds the members of a family, in its own folder and in installed packages."""

from __future__ import annotations

import importlib
import pkgutil
from importlib.metadata import entry_points
from types import ModuleType

from relay.errors import ConfigError


def members(family: ModuleType) -> dict[str, ModuleType]:
    """The members of a family by name: its public modules, then the entry points of the group named like the package.

    An installed package adds a member to ``relay.sinks`` with an entry point of group ``relay.sinks`` that names a
    module. Raises ConfigError when two members share a name.
    """
    found = {
        module.name: importlib.import_module(f"{family.__name__}.{module.name}")
        for module in pkgutil.iter_modules(family.__path__)
        if not module.name.startswith("_")
    }
    for point in entry_points(group=family.__name__):
        if point.name in found:
            raise ConfigError(
                f"expected one member named {point.name} in {family.__name__}, {point.value} is a second one"
            )
        found[point.name] = point.load()
    return found
