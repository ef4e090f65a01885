"""The results of the checks of ``imds-relay doctor``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "warning", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of one check. ``subject`` names what was checked. No text contains a secret."""

    subject: str
    state: State
    message: str
    remedy: str | None = None

    @property
    def line(self) -> str:
        return self.message if self.remedy is None else f"{self.message}. Remedy: {self.remedy}"


def ok(subject: str, message: str) -> Finding:
    return Finding(subject=subject, state="ok", message=message)


def warning(subject: str, message: str, remedy: str | None = None) -> Finding:
    return Finding(subject=subject, state="warning", message=message, remedy=remedy)


def failure(subject: str, message: str, remedy: str) -> Finding:
    return Finding(subject=subject, state="failed", message=message, remedy=remedy)
