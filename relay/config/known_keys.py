"""The keys that the sections of a configuration have, read from their pydantic models.

They say which keys hold secrets, and what a person may have meant by a key that no section has.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, TypeGuard, get_args

from pydantic import BaseModel, SecretStr

from relay.suggestions import closest


@functools.cache
def secret_keys(root: type[BaseModel]) -> frozenset[str]:
    """Return the keys that hold secrets, in any section of the document ``root``."""
    keys = {"key_sha256"}  # people put the key itself here by mistake
    sections = [root]
    for section in sections:  # grows by the sections inside, which may contain themselves
        for name, field in section.model_fields.items():
            for inner in _nested_annotations(field.annotation):
                if inner is SecretStr:
                    keys.add(name)
                elif _is_section(inner) and inner not in sections:
                    sections.append(inner)
    return frozenset(keys)


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
        if name != location[0] and key in _keys_of_section(section)
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
        sections = inner or [each for each in sections if _is_alternative(each, part)] or sections
    return list(dict.fromkeys(key for section in sections for key in _keys_of_section(section)))


def _find_field(section: type[BaseModel], key: str) -> Any:
    return next(
        (field for name, field in section.model_fields.items() if key in (field.alias, name)), None
    )


def _is_alternative(section: type[BaseModel], name: str) -> bool:
    if section.__name__ == name:
        return True
    return any(
        (field := section.model_fields.get(tag)) is not None and name in get_args(field.annotation)
        for tag in ("kind", "role")
    )


def _keys_of_section(section: type[BaseModel]) -> list[str]:
    return [field.alias or name for name, field in section.model_fields.items()]


def _sections_in_annotation(annotation: Any) -> Iterator[type[BaseModel]]:
    return filter(_is_section, _nested_annotations(annotation))


def _is_section(annotation: Any) -> TypeGuard[type[BaseModel]]:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _nested_annotations(annotation: Any) -> Iterator[Any]:
    """Yield an annotation and every annotation inside it."""
    yield annotation
    for argument in get_args(annotation):
        yield from _nested_annotations(argument)
