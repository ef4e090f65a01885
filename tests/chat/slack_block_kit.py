"""Checks blocks against the limits of Block Kit, and reads their text.

Only the blocks that the relay uses are known. Source: https://docs.slack.dev/reference/block-kit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Block = Mapping[str, Any]

_MAX_LENGTHS = {
    "section": 3000,
    "header": 150,
    "button": 75,
    "value": 2000,
    "url": 3000,
    "confirm title": 100,
    "confirm text": 300,
    "confirm label": 30,
}
_STYLES = {"bold", "italic", "strike", "code"}


def is_valid_block_kit(blocks: Sequence[Block]) -> bool:
    action_ids = [button["action_id"] for button in elements(blocks, "actions")]
    return (
        1 <= len(blocks) <= 50
        and all(map(_is_valid_block, blocks))
        and len(action_ids) == len(set(action_ids))
    )


def elements(blocks: Sequence[Block], kind: str) -> list[dict[str, Any]]:
    """Return the elements of the blocks of one kind, in order."""
    return [element for block in blocks if block["type"] == kind for element in block["elements"]]


def rich_text_elements(blocks: Sequence[Block]) -> list[Mapping[str, Any]]:
    """Return every element of the rich texts, in order."""
    return [element for section in elements(blocks, "rich_text") for element in section["elements"]]


def text_of_blocks(blocks: Sequence[Block]) -> str:
    """Return what a reader sees, one line per block. Buttons are in brackets."""
    return "\n".join("".join(_texts(block)) for block in blocks)


def _texts(block: Block) -> Iterator[str]:
    match block["type"]:
        case "header":
            yield block["text"]["text"]
        case "context":
            yield " ".join(element["text"] for element in block["elements"])
        case "actions":
            yield " ".join(f"[{element['text']['text']}]" for element in block["elements"])
        case _:
            for element in rich_text_elements([block]):
                match element["type"]:
                    case "user":
                        yield f"@{element['user_id']}"
                    case "date":
                        yield element["fallback"]
                    case _:
                        yield element["text"]


def _is_valid_block(block: Block) -> bool:
    match block["type"]:
        case "header":
            return _is_plain_text(block["text"], "header")
        case "context":
            return 1 <= len(block["elements"]) <= 10 and all(
                _is_plain_text(element, "section") for element in block["elements"]
            )
        case "rich_text":
            return all(
                section["type"] == "rich_text_section" for section in block["elements"]
            ) and all(map(_is_valid_rich_text_element, rich_text_elements([block])))
        case "actions":
            return 1 <= len(block["elements"]) <= 25 and all(
                map(_is_valid_button, block["elements"])
            )
    return False


def _is_plain_text(text: Mapping[str, Any], limit: str) -> bool:
    return text["type"] == "plain_text" and 1 <= len(text["text"]) <= _MAX_LENGTHS[limit]


def _is_valid_rich_text_element(element: Mapping[str, Any]) -> bool:
    if "style" in element and not (element["style"] and set(element["style"]) <= _STYLES):
        return False
    match element["type"]:
        case "text":
            return bool(element["text"])
        case "date":
            return isinstance(element["timestamp"], int) and "{" in element["format"]
        case "link":
            return bool(element["text"]) and bool(element["url"].startswith("https://"))
        case "user":
            return bool(element["user_id"].startswith(("U", "W")))
    return False


def _is_valid_button(button: Mapping[str, Any]) -> bool:
    confirm = button.get("confirm")
    has_valid_confirm = confirm is None or (
        _is_plain_text(confirm["title"], "confirm title")
        and _is_plain_text(confirm["text"], "confirm text")
        and _is_plain_text(confirm["confirm"], "confirm label")
        and _is_plain_text(confirm["deny"], "confirm label")
    )
    has_valid_lengths = (
        len(button.get("value", "")) <= _MAX_LENGTHS["value"]
        and len(button.get("url", "")) <= _MAX_LENGTHS["url"]
        and len(button["action_id"]) <= 255
    )
    return (
        button["type"] == "button"
        and _is_plain_text(button["text"], "button")
        and has_valid_confirm
        and has_valid_lengths
        and button.get("style") in (None, "primary", "danger")
    )
