"""Knowledge: what each architecture calls its embedding, head and biases, and when it ties them.

The tables are data, made by `tools/`; `resolve` turns a config and the names in a file into a `Declaration`.
"""

from bowline.families.declaration import Declaration, DeclaredTie, Flag, StatedSize
from bowline.families.resolver import resolve

__all__ = ["Declaration", "DeclaredTie", "Flag", "StatedSize", "resolve"]
