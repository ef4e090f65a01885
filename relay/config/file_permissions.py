"""Examines for ``doctor`` who else on this machine can read or write files that hold secrets."""

from __future__ import annotations

import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, SecretStr

from relay.config import Loaded
from relay.diagnostics import Finding, failure, ok, warning

_PUBLIC_FILES = frozenset({"cert_file", "ca_file", "client_ca_file"})
"""Keys of files that hold no secret."""


def diagnose_secret_files(loaded: Loaded) -> list[Finding]:
    """Return a finding for each secret file that others can read or write; else one that is ok."""
    files = dict(_secret_files("", loaded.config))
    if loaded.file is not None and any(_secrets(loaded.config)):
        files[loaded.file] = "the configuration, which holds secrets itself"
    findings = [
        finding for file, label in files.items() if (finding := _diagnose(file, label)) is not None
    ]
    if findings:
        return findings
    if files:
        return [ok("secrets", f"nobody else can read their files ({len(files)})")]
    return [ok("secrets", "no secret is in a file")]


def _diagnose(file: Path, label: str) -> Finding | None:
    try:
        mode = file.stat().st_mode
    except OSError as error:
        return failure(
            "secrets",
            f"{file} ({label}) cannot be examined: {error.strerror}",
            "correct its path, or the rights of its folders",
        )
    remedy = f"chmod o-rwx {file}"
    if mode & stat.S_IWOTH:
        return failure("secrets", f"everybody on this machine can write {file} ({label})", remedy)
    if mode & stat.S_IROTH:
        return warning("secrets", f"everybody on this machine can read {file} ({label})", remedy)
    return None


def _secret_files(path: str, value: Any) -> Iterator[tuple[Path, str]]:
    """Yield each file that holds a secret, with its key path."""
    for name, inner in _children(value):
        key_path = f"{path}.{name}".removeprefix(".")
        is_file = isinstance(inner, Path) and str(name).endswith("_file")
        if is_file and name not in _PUBLIC_FILES:
            yield inner, key_path
        else:
            yield from _secret_files(key_path, inner)


def _secrets(value: Any) -> Iterator[SecretStr]:
    """Yield each secret that is in the configuration itself."""
    if isinstance(value, SecretStr):
        yield value
    for _, inner in _children(value):
        yield from _secrets(inner)


def _children(value: Any) -> Iterator[tuple[str | int, Any]]:
    if isinstance(value, BaseModel):
        yield from ((name, getattr(value, name)) for name in type(value).model_fields)
    elif isinstance(value, Mapping):
        yield from value.items()
    elif isinstance(value, tuple):
        yield from enumerate(value)
