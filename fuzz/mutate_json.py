"""Changes JSON and leaves it JSON: bytes that are changed at random are mostly refused at once."""

from __future__ import annotations

import copy
import json
import random
from typing import Any, Final

VALUES: Final[tuple[Any, ...]] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**53, 2**63, -(2**63) - 1, 2**64, 1e308, -0.0, 0.5),
    *(
        "",
        " ",
        "\x00",
        "\x7f",
        "\u202e",
        "\ud800",
        "é",
        "\U0001d56c",
        "a" * 300,
        "A",
        "a",
        "..",
        "%",
        "${a}",
    ),
    *(
        "Started",
        "Scheduled",
        "User",
        "approve",
        "2022-04-11T22:26:58Z",
        "0001-01-01T00:00:00+23:59",
    ),
    *(
        "9999-12-31T23:59:59.999999-23:59",
        "imds://a/relays/b",
        "vm:a/b",
        [],
        {},
        [[]],
        [{}],
        {"": 0},
    ),
)


def mutate_json(data: bytes, chance: random.Random) -> bytes | None:
    """Return JSON with one to three changes; None if the bytes are no JSON, or too deep."""
    try:
        root = [json.loads(data)]
        for _ in range(chance.randint(1, 3)):
            _change(*chance.choice(_places(root)), chance)
        return json.dumps(root[0], ensure_ascii=chance.random() < 0.5).encode(
            "utf-8", "surrogatepass"
        )
    except (ValueError, RecursionError):
        return None


def _places(root: list[Any]) -> list[tuple[Any, Any]]:
    """Return each container with each of its keys or positions."""
    places: list[tuple[Any, Any]] = []
    waiting: list[Any] = [root]
    while waiting:
        container = waiting.pop()
        keys = list(container) if isinstance(container, dict) else list(range(len(container)))
        for key in keys:
            places.append((container, key))
            if isinstance(container[key], dict | list):
                waiting.append(container[key])
    return places


def _change(container: Any, key: Any, chance: random.Random) -> None:
    value = container[key]
    match chance.randrange(6):
        case 0 if isinstance(container, dict):
            del container[key]
        case 1 if isinstance(container, dict):
            container[str(chance.choice(VALUES))] = copy.deepcopy(value)
        case 1 if isinstance(container, list) and len(container) < 50:
            container.append(copy.deepcopy(value))
        case 2 if isinstance(value, str) and value:
            at = chance.randrange(len(value))
            container[key] = value[:at] + str(chance.choice(VALUES)) + value[at + 1 :]
        case 3 if isinstance(value, str):
            container[key] = value * 2 if len(value) < 300 else value[:5]
        case 4:
            container[key] = [value]
        case _:
            container[key] = copy.deepcopy(chance.choice(VALUES))
