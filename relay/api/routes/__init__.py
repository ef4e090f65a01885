"""The routes of the API: a module for each resource. A new module needs no registration."""

from __future__ import annotations

import pkgutil
from importlib import import_module
from operator import attrgetter

from relay.api.schema.route import Route


def all_routes() -> list[Route]:
    """Return the routes that the modules of this package list in `ROUTES`, ordered by path."""
    routes: list[Route] = []
    for module in pkgutil.iter_modules(__path__):
        routes.extend(import_module(f"{__name__}.{module.name}").ROUTES)
    return sorted(routes, key=attrgetter("path"))
