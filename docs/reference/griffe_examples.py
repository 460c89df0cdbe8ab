"""Shows the `Example:` sections of docstrings as code; mkdocstrings knows only `Examples:`."""

import re
from typing import Any

import griffe


class Examples(griffe.Extension):
    """Renames the sections before they are parsed."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Renames the section of one object."""
        if obj.docstring is not None:
            text = obj.docstring.value
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", text, flags=re.MULTILINE)
