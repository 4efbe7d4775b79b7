"""Text for the tests: a few modules of the standard library, cut small."""

from __future__ import annotations

import sysconfig
from pathlib import Path

MODULES = ["abc", "bisect", "bdb", "calendar", "cmd", "code", "copy", "csv", "dis", "enum", "fnmatch", "glob", "heapq"]
MODULES += ["keyword", "linecache", "locale", "operator", "pprint", "queue", "random", "reprlib", "sched", "shlex"]


def library(directory: Path, characters: int = 4000) -> Path:
    """`directory` with the beginning of each of 23 modules, as files."""
    root = Path(sysconfig.get_paths()["stdlib"])
    directory.mkdir(parents=True, exist_ok=True)
    for name in MODULES:
        (directory / f"{name}.py").write_text((root / f"{name}.py").read_text()[:characters])
    return directory
