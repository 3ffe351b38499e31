"""Hooks of our site: whole folders in the navigation, and links that leave docs/."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
FOLDERS = {"Understand": "understand", "Why it is so": "design", "Benchmarks": "benchmarks"}
_LINK = re.compile(r"\[([^]]+)\]\(((?:\.\./)+[^)#\s]+)[^)\s]*\)")


def on_config(config: Any) -> Any:
    """Pages of these folders need no line in mkdocs.yml."""
    for title, folder in FOLDERS.items():
        config.nav.append({title: [f"{folder}/{page.name}" for page in sorted((DOCS / folder).glob("*.md"))]})
    return config


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """A file of the repository that is not on the site is named by its path instead."""
    folder = (DOCS / page.file.src_uri).parent

    def named(link: re.Match[str]) -> str:
        target = (folder / link[2]).resolve()
        if target.is_relative_to(DOCS) and target.suffix != "":
            return link[0]
        return f"{link[1]} (`{target.relative_to(DOCS.parent)}`)"

    return _LINK.sub(named, markdown)
