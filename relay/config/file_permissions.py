"""Examines for ``doctor`` who else on this machine can read or write files that hold secrets."""

from __future__ import annotations

import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, SecretStr

from relay.config import LoadedConfig
from relay.doctor_findings import Finding, failure, ok, warning

_PUBLIC_FILES = frozenset({"cert_file", "ca_file", "client_ca_file"})
"""Keys of files that hold no secret."""


def diagnose_secret_files(loaded: LoadedConfig) -> list[Finding]:
    """Return a finding for each secret file that others can read or write; else one that is ok."""
    values = list(_leaf_values("", loaded.config))
    files = {
        value: key_path
        for key_path, value in values
        if isinstance(value, Path) and _names_secret_file(key_path)
    }
    holds_secrets = any(isinstance(value, SecretStr) and value for _, value in values)
    if loaded.file is not None and holds_secrets:
        files[loaded.file] = "the configuration, which holds secrets itself"
    findings = [
        finding
        for file, label in files.items()
        if (finding := _diagnose_file(file, label)) is not None
    ]
    if findings:
        return findings
    if files:
        return [ok("secrets", f"nobody else can read their files ({len(files)})")]
    return [ok("secrets", "no secret is in a file")]


def _diagnose_file(file: Path, label: str) -> Finding | None:
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


def _names_secret_file(key_path: str) -> bool:
    key = key_path.rpartition(".")[2]
    return key.endswith("_file") and key not in _PUBLIC_FILES


def _leaf_values(key_path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield each value without parts that is in a section, with its key path."""
    parts: Iterable[tuple[str | int, Any]]
    if isinstance(value, BaseModel):
        parts = ((name, getattr(value, name)) for name in type(value).model_fields)
    elif isinstance(value, Mapping):
        parts = value.items()
    elif isinstance(value, tuple):
        parts = enumerate(value)
    else:
        yield key_path, value
        return
    for name, part in parts:
        yield from _leaf_values(f"{key_path}.{name}".removeprefix("."), part)
