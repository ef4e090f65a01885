"""The routes of the API: a module for each resource. A new module needs no registration."""

from __future__ import annotations

import pkgutil
from importlib import import_module
from operator import attrgetter

from relay.api.calls import ROUTES, Route


def all_routes() -> list[Route]:
    for module in pkgutil.iter_modules(__path__):
        import_module(f"{__name__}.{module.name}")
    return sorted(ROUTES, key=attrgetter("path"))
