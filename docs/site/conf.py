"""Settings of Sphinx, which makes a site of the documentation: `make site`.

The pages are those that GitHub shows, at the same places, so that their links work in both. The
navigation is the list of docs/README.md.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from pygments.lexers.special import TextLexer  # type: ignore[import-untyped]  # it has no types

ROOT = Path(__file__).parents[2]
INDEX = ROOT / "docs" / "README.md"

project = "imds-relay"
project_copyright = "the authors of imds-relay"
root_doc = "README"
include_patterns = ["*.md", "docs/**.md"]
exclude_patterns = [".*", "bench", "build", "config", "deploy", "dist", "examples", "relay"]
exclude_patterns += ["requirements", "tests"]

extensions = ["myst_parser"]
myst_heading_anchors = 4
myst_enable_extensions = ["html_image"]

html_theme = "pydata_sphinx_theme"
html_title = "imds-relay"
html_theme_options = {
    "logo": {"text": "imds-relay"},
    "navbar_center": [],
    "navbar_end": ["search-button-field", "theme-switcher"],
    "navbar_persistent": [],
    "search_bar_text": "Search",
    "show_nav_level": 1,
    "navigation_depth": 2,
    "show_toc_level": 1,
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": [],
    "show_prev_next": True,
    "use_edit_page_button": False,
}
html_sidebars = {"**": ["all-pages"]}
html_static_path = ["static"]
html_css_files = ["site.css"]
html_additional_pages = {"index": "to-first-page.html"}
html_show_search_summary = False  # a page on disk may not fetch other pages
html_show_sourcelink = False
html_copy_source = False
templates_path = ["templates"]


def navigation() -> str:
    """Return the list of docs/README.md as directives that make the navigation."""
    parts = ["```{toctree}", ":hidden:", "Overview <docs/README>", "```", ""]
    for part in re.split(r"^\*\*", INDEX.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        caption, _, links = part.partition("**")
        pages = re.findall(r"\[([^]]+)\]\(([^)#]+)\.md\)", links)
        entries = [
            f"{title} <{(INDEX.parent / page).resolve().relative_to(ROOT)}>"
            for title, page in pages
        ]
        parts += ["```{toctree}", ":hidden:", f":caption: {caption}", *entries, "```", ""]
    return "\n".join(parts)


def add_navigation(_app: object, page: str, source: list[str]) -> None:
    """Add the navigation to the first page."""
    if page == root_doc:
        source[0] += f"\n{navigation()}"


def setup(app: Any) -> None:
    """Let Sphinx call `add_navigation` for each page that it reads.

    Diagrams of Mermaid are shown as text: the program that draws them would come from elsewhere.
    """
    app.connect("source-read", add_navigation)
    app.add_lexer("mermaid", TextLexer)
