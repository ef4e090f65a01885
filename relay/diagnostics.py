"""What `doctor` finds: one thing that was looked at, how it is, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "warning", "failed"]


@dataclass(frozen=True, slots=True)
class Finding:
    """``about`` names what was looked at, ``said`` is a sentence without secrets, ``remedy`` what to do where it is not ok."""

    subject: str
    state: State
    message: str
    remedy: str | None = None

    @property
    def line(self) -> str:
        """What was found and what to do, on a line."""
        return self.message if self.remedy is None else f"{self.message}. Remedy: {self.remedy}"


def ok(about: str, said: str) -> Finding:
    """It is as it should be."""
    return Finding(about, "ok", said)


def warning(about: str, said: str, remedy: str) -> Finding:
    """The relay would run, and somebody should know."""
    return Finding(about, "warning", said, remedy)


def failure(about: str, said: str, remedy: str) -> Finding:
    """The relay would not run, or not do this part of its work."""
    return Finding(about, "failed", said, remedy)
