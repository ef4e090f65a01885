"""Who else on this machine can read the secrets, for `doctor`: the rights of their files, and of a document that holds some."""

from __future__ import annotations

import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, SecretStr

from relay.config import Loaded
from relay.diagnostics import Finding, failure, ok, warning

_PUBLIC = frozenset({"cert_file", "ca_file", "client_ca_file"})
"""Files that are shown to everybody anyway."""


def exposed_secret_files(loaded: Loaded) -> list[Finding]:
    """A finding for each file that others can read or write though it holds a secret; one alone where there is none."""
    files = dict(_secret_files("", loaded.config))
    if loaded.file is not None and any(_plain(loaded.config)):
        files[loaded.file] = "the configuration, which holds secrets itself"
    findings = [found for file, what in files.items() if (found := _seen(file, what)) is not None]
    return findings or [
        ok(
            "secrets",
            f"nobody else can read their files ({len(files)})" if files else "none lives in a file",
        )
    ]


def _seen(file: Path, what: str) -> Finding | None:
    try:
        mode = file.stat().st_mode
    except OSError as error:
        return failure(
            "secrets",
            f"{file} ({what}) cannot be looked at: {error.strerror}",
            "correct its path, or who may reach it",
        )
    if mode & stat.S_IWOTH:
        return failure(
            "secrets", f"everybody on this machine can write {file} ({what})", f"chmod o-rwx {file}"
        )
    if mode & stat.S_IROTH:
        return warning(
            "secrets", f"everybody on this machine can read {file} ({what})", f"chmod o-rwx {file}"
        )
    return None


def _secret_files(path: str, value: Any) -> Iterator[tuple[Path, str]]:
    for name, inner in _parts(value):
        key = f"{path}.{name}".removeprefix(".")
        if isinstance(inner, Path) and str(name).endswith("_file") and name not in _PUBLIC:
            yield inner, key
        else:
            yield from _secret_files(key, inner)


def _plain(value: Any) -> Iterator[SecretStr]:
    if isinstance(value, SecretStr):
        yield value
    for _, inner in _parts(value):
        yield from _plain(inner)


def _parts(value: Any) -> Iterator[tuple[str | int, Any]]:
    if isinstance(value, BaseModel):
        yield from ((name, getattr(value, name)) for name in type(value).model_fields)
    elif isinstance(value, Mapping):
        yield from value.items()
    elif isinstance(value, tuple):
        yield from enumerate(value)
