"""The blocks of code in the documentation, for the tests that run them.

Each block is run by a test, or its info string says why not, such as `sh not run: it needs nginx`.
A test gets the text of a block from `block` or `blocks`. So tests/test_documentation.py finds the
blocks that no test asks for.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[1]
PAGES = tuple(
    path.relative_to(ROOT).as_posix()
    for path in sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
)
EVERY_PAGE = ""
"""In place of a page: all of them."""
PICTURES = frozenset({"text", "mermaid"})
"""Languages of blocks that show something and hold nothing to run."""
NOT_RUN = "not run: "


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A block, where it is, and why it is not run, if it is not."""

    page: str
    heading: str
    line: int
    language: str
    why_not_run: str
    text: str

    @property
    def place(self) -> str:
        """The page and the line, as an editor takes them."""
        return f"{self.page}:{self.line}"


def block(page: str, language: str, heading: str = "") -> str:
    """Return the text of the only block of a language on a page, or under one of its headings."""
    (only,) = blocks(page, language, heading)
    return only


def blocks(page: str, language: str, heading: str = "") -> list[str]:
    """Return the texts of all blocks of a language that are run, in the order of the page."""
    return [found.text for found in select(page, language, heading)]


def select(page: str, language: str, heading: str = "") -> list[Block]:
    """Return the blocks of a language that are run, in the order of the page."""
    return [
        found
        for found in every_block()
        if found.language == language
        and page in {found.page, EVERY_PAGE}
        and heading in {found.heading, ""}
        and not found.why_not_run
    ]


@functools.cache
def every_block() -> tuple[Block, ...]:
    """Return the blocks of all pages. An indented block has no language."""
    return tuple(found for page in PAGES for found in blocks_of(page, ROOT))


def blocks_of(page: str, root: Path) -> Iterator[Block]:
    heading = ""
    tokens = MarkdownIt("commonmark").parse((root / page).read_text(encoding="utf-8"))
    for before, token in zip([None, *tokens], tokens, strict=False):
        if before is not None and before.type == "heading_open":
            heading = token.content
        if token.type in {"fence", "code_block"}:
            language, _, rest = token.info.strip().partition(" ")
            assert token.map is not None
            yield Block(
                page=page,
                heading=heading,
                line=token.map[0] + 1,
                language=language,
                why_not_run=rest.removeprefix(NOT_RUN) if rest.startswith(NOT_RUN) else "",
                text=token.content,
            )


def unclaimed() -> list[Block]:
    """Return the blocks that no test asks for, and that do not say why."""
    claims = {claim for file in (ROOT / "tests").rglob("*.py") for claim in _claims(file)}
    return [
        found
        for found in every_block()
        if found.language not in PICTURES
        and not found.why_not_run
        and not any(
            (page, found.language, heading) in claims
            for page in (found.page, EVERY_PAGE)
            for heading in (found.heading, "")
        )
    ]


def _claims(file: Path) -> Iterator[tuple[str, str, str]]:
    """Yield what a test file asks `block`, `blocks` or `select` for.

    Arguments are strings, or names of constants of the file.
    """
    text = file.read_text(encoding="utf-8")
    if "documented" not in text or file == Path(__file__):
        return
    tree = ast.parse(text)
    constants: dict[str, object] = {"EVERY_PAGE": EVERY_PAGE}
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Constant):
            constants |= {_name(target): statement.value.value for target in statement.targets}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _name(node.func) in {"block", "blocks", "select"}:
            arguments = [
                each.value if isinstance(each, ast.Constant) else constants.get(_name(each))
                for each in node.args
            ]
            page, language, heading = [*arguments, "", ""][:3]
            yield str(page), str(language), str(heading)


def _name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
