"""An extension of griffe: the doctest below `Example:` in a docstring is shown as code, as below `Examples:`."""

from __future__ import annotations

import re
from typing import Any

import griffe

__all__ = ["DocstringExamples"]


class DocstringExamples(griffe.Extension):
    """Renames the section before a docstring is parsed."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^(\s*)Example:$", r"\1Examples:", obj.docstring.value, flags=re.MULTILINE)
