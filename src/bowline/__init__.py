"""Bowline: weight tying in language models, from the line that declares it to the file that ships it.

The public names and the rooms are listed once, in `__init__.pyi`, where type checkers read them too. Each is imported
when it is first used, so that `bowline audit` never loads torch.
"""

from __future__ import annotations

from typing import Any

import lazy_loader

__version__ = "0.1.0"

_import_name, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'bowline' has no attribute {name!r}")
    try:
        return _import_name(name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        from bowline.errors import how_to_install

        raise ModuleNotFoundError(
            f"bowline.{name} needs torch, which is not installed: {how_to_install('torch')}", name="torch"
        ) from None
