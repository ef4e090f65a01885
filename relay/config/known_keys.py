"""Says what a person may have meant by a key that no section of the configuration has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, get_args

from pydantic import BaseModel

from relay.suggestions import closest


def describe_unknown_key(root: type[BaseModel], location: Sequence[str | int]) -> str:
    """Return what is wrong with a key, and what may be meant.

    ``location`` is that of pydantic's error: the path of the key with the alternatives of unions.
    """
    key = str(location[-1])
    keys = _keys_at(root, location[:-1])
    close = closest(key, keys)
    known = f"the keys here are {', '.join(keys)}"
    if close is not None:
        return f"unknown key; did you mean {close}? {known[0].upper()}{known[1:]}"
    elsewhere = [
        f"{name}.{key}"
        for name, field in root.model_fields.items()
        for section in _sections_in_annotation(field.annotation)
        if name != location[0] and key in _keys_of(section)
    ]
    if elsewhere:
        return f"unknown key; did you mean {' or '.join(dict.fromkeys(elsewhere))}?"
    return f"unknown key; {known}"


def _keys_at(root: type[BaseModel], location: Sequence[str | int]) -> list[str]:
    """Return the keys of the section at a location. Alternatives that nobody chose count too."""
    sections = [root]
    for part in location:
        if isinstance(part, int):
            continue
        fields = [_find_field(section, part) for section in sections]
        inner = [
            found
            for field in fields
            if field is not None
            for found in _sections_in_annotation(field.annotation)
        ]
        # Else the part is the name of an alternative, such as the kind of a sink.
        sections = (
            inner or [each for each in sections if _is_union_member_named(each, part)] or sections
        )
    return list(dict.fromkeys(key for section in sections for key in _keys_of(section)))


def _find_field(section: type[BaseModel], key: str) -> Any:
    return next(
        (field for name, field in section.model_fields.items() if key in (field.alias, name)), None
    )


def _is_union_member_named(section: type[BaseModel], name: str) -> bool:
    if section.__name__ == name:
        return True
    return any(
        (field := section.model_fields.get(tag)) is not None and name in get_args(field.annotation)
        for tag in ("kind", "role")
    )


def _keys_of(section: type[BaseModel]) -> list[str]:
    return [field.alias or name for name, field in section.model_fields.items()]


def _sections_in_annotation(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _sections_in_annotation(inner)
