"""The documentation is the contract: its links lead somewhere, and what the code cites is there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.documented import every_block, unclaimed

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
SOURCES = sorted(
    path
    for folder in ("relay", "tests", "bench", "examples")
    for path in (ROOT / folder).rglob("*.py")
)
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(
        r"^#+ (.+)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE
    )
    return {re.sub(r"[^\w\- ]", "", reference.lower()).replace(" ", "-") for reference in headings}


def leads_nowhere(page: Path, anchor: str) -> bool:
    """Whether a page, or the heading that is meant, is missing."""
    return not page.exists() or bool(anchor and anchor not in anchors(page))


def links(page: Path) -> Iterator[tuple[Path, str]]:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" not in target:
            path, _, anchor = target.partition("#")
            yield (page.parent / path if path else page), anchor


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    assert [f"{path}#{anchor}" for path, anchor in links(page) if leads_nowhere(path, anchor)] == []


def test_every_page_that_the_code_cites_is_there() -> None:
    cited = {
        reference
        for path in SOURCES
        for reference in re.findall(
            r"\bdocs/[\w/.-]+\.md(?:#[\w-]+)?", path.read_text(encoding="utf-8")
        )
    }
    assert len(cited) > 30
    wrong = [
        reference
        for reference in cited
        if leads_nowhere(ROOT / reference.partition("#")[0], reference.partition("#")[2])
    ]
    assert wrong == []


def test_every_test_that_a_guarantee_names_is_there() -> None:
    parts = re.split(
        r"^## ", (ROOT / "docs/guarantees.md").read_text(encoding="utf-8"), flags=re.MULTILINE
    )[1:]
    named = {part.splitlines()[0]: re.findall(r"`(tests/[\w/]+\.py)`", part) for part in parts}
    assert [title for title, tests in named.items() if not tests] == []


def test_every_test_that_a_page_names_is_there() -> None:
    """A name without a folder is in the folder of the test before it."""
    missing = []
    for page in PAGES:
        folder = ROOT
        for name in re.findall(
            r"`((?:tests/[\w/]*)?test_\w+\.py)`", page.read_text(encoding="utf-8")
        ):
            path = ROOT / name if name.startswith("tests/") else folder / name
            folder = path.parent
            if not path.exists():
                missing.append((page.name, name))
    assert missing == []


def test_the_index_names_every_page() -> None:
    index = ROOT / "docs" / "README.md"
    named = {path.resolve() for path, _ in links(index)}
    pages = {page for page in PAGES if page.is_relative_to(ROOT / "docs")}
    assert [str(page) for page in sorted(pages - named - {index})] == []


def test_every_block_is_run_by_a_test_or_says_why_not() -> None:
    """Write the reason behind the language of the block: `sh not run: it needs a cluster`."""
    assert [f"{block.place} ({block.language})" for block in unclaimed()] == []


def test_every_block_has_a_language() -> None:
    """An indented block has none."""
    assert [block.place for block in every_block() if not block.language] == []
