"""The routes of the API: a module for each resource. A new module needs no registration."""

from __future__ import annotations

import pkgutil
from importlib import import_module

from relay.api.schema.route import Route


def all_routes() -> tuple[Route, ...]:
    """Return the routes that the modules of this package list in `ROUTES`, in their order."""
    modules = sorted(module.name for module in pkgutil.iter_modules(__path__))
    routes: list[Route] = []
    for name in modules:
        routes.extend(import_module(f"{__name__}.{name}").ROUTES)
    return tuple(routes)
