"""Let the site read our docstrings: their `Example:` is what griffe calls `Examples:`."""

import re
from typing import Any

import griffe


class Examples(griffe.Extension):
    """Rename the section before it is parsed."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Take an object that was found."""
        if obj.docstring is not None:
            text = obj.docstring.value
            obj.docstring.value = re.sub(r"^(\s*)Example:$", r"\1Examples:", text, flags=re.M)
