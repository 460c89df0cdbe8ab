"""Shows the version on each page, and fails if a documented object has no anchor on its page."""

import re
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.pages import Page

import jaxcomp


def on_config(config: MkDocsConfig) -> None:
    """Writes the version at the foot of each page; MkDocs calls it."""
    config.copyright = f"jaxcomp {jaxcomp.__version__}"


def on_page_content(html: str, page: Page, **_: Any) -> None:
    """Checks a page once it is rendered; MkDocs calls it."""
    names = re.findall(r"^::: (\S+)", page.markdown or "", re.MULTILINE)
    missing = [name for name in names if f'id="{name}"' not in html]
    if missing:
        raise PluginError(f"{page.file.src_path}: no anchor of {', '.join(missing)}")
