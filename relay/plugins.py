"""Finds the members of a family, such as the sinks: modules of its package, and entry points."""

from __future__ import annotations

import importlib
import pkgutil
from importlib.metadata import entry_points
from types import ModuleType

from relay.errors import ConfigError


def load_plugins(family: ModuleType) -> dict[str, ModuleType]:
    """Return the members of a family by name.

    These are the public modules of the package, and the entry points of the group with the name of
    the package. So an installed package adds a sink with an entry point of the group
    ``relay.sinks`` that names a module. Raises ConfigError if two members have the same name.
    """
    modules = {
        module.name: importlib.import_module(f"{family.__name__}.{module.name}")
        for module in pkgutil.iter_modules(family.__path__)
        if not module.name.startswith("_")
    }
    for entry_point in entry_points(group=family.__name__):
        if entry_point.name in modules:
            raise ConfigError(
                f"expected one member named {entry_point.name} in {family.__name__}, "
                f"{entry_point.value} is a second one"
            )
        modules[entry_point.name] = entry_point.load()
    return modules
