"""Fails the build of the documentation if a documented object has no anchor on its page."""

import re
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.pages import Page


def on_page_content(html: str, page: Page, **_: Any) -> None:
    """Checks a page once it is rendered; MkDocs calls it."""
    names = re.findall(r"^::: (\S+)", page.markdown or "", re.MULTILINE)
    missing = [name for name in names if f'id="{name}"' not in html]
    if missing:
        raise PluginError(f"{page.file.src_path}: no anchor of {', '.join(missing)}")
