"""How a run's processes are arranged: the dimensions of its mesh and their sizes, by `--parallel` and `--mesh`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from difflib import get_close_matches

from bowline.errors import UsageError

__all__ = ["PARALLEL", "mesh_sizes", "stated_mesh"]

PARALLEL = ("ddp", "fsdp", "tp", "pp")
"""Replicas, parameters spread over the processes (FSDP2), split layers, and stages."""
ORDER = ("pp", "ddp", "fsdp", "tp")
"""From the outermost dimension to the innermost, whose processes communicate most."""
APART = (("ddp", "tp", "fsdp"), ("pp", "ddp", "fsdp"), ("pp", "tp", "fsdp"))
"""Dimensions that are not combined, and the one that serves instead of the second."""


def stated_mesh(text: str) -> dict[str, int]:
    """The sizes that a text such as `fsdp=2,tp=2` states, in the order of the mesh.

    Raises:
        UsageError: it is not such a text, or it combines dimensions that are not combined.

    Example:
        >>> stated_mesh("tp=2,fsdp=4")
        {'fsdp': 4, 'tp': 2}
    """
    found: dict[str, int] = {}
    for part in text.split(",") if isinstance(text, str) else [""]:
        name, _, size = (each.strip() for each in part.partition("="))
        if name not in PARALLEL:
            close = get_close_matches(name, PARALLEL, n=1)
            raise UsageError(
                f"mesh={text!r:.60}: {name!r:.20} is no dimension, expected {', '.join(PARALLEL)}",
                help=f"perhaps {close[0]}" if close else "such as fsdp=2,tp=2",
                argument="mesh",
            )
        if not (size.isascii() and size.isdecimal() and int(size[:9]) > 0 and len(size) < 9):
            raise UsageError(
                f"mesh={text!r:.60}: {name}={size!r:.20}, expected a whole number from 1",
                help="such as fsdp=2,tp=2",
                argument="mesh",
            )
        if name in found:
            raise UsageError(f"mesh={text!r:.60}: states {name} twice, expected it once", argument="mesh")
        found[name] = int(size)
    for one, other, instead in APART:
        if found.get(one, 1) > 1 and found.get(other, 1) > 1:
            raise UsageError(
                f"mesh={text!r:.60}: {one} and {other} are not combined",
                help=f"combine {one if one == 'pp' else other} with {instead}",
                argument="mesh",
            )
    return {name: found[name] for name in ORDER if name in found}


def mesh_sizes(parallel: str | None, mesh: str | None, processes: int) -> Mapping[str, int]:
    """The sizes of the mesh's dimensions on this number of processes.

    Raises:
        UsageError: the mesh has another number of places than there are processes.

    Example:
        >>> mesh_sizes("fsdp", None, 2), mesh_sizes(None, None, 2), mesh_sizes(None, "fsdp=2,tp=2", 4)
        ({'fsdp': 2}, {'ddp': 2}, {'fsdp': 2, 'tp': 2})
    """
    if mesh is None:
        return {parallel or "ddp": processes}
    sizes = stated_mesh(mesh)
    places = math.prod(sizes.values())
    if places != processes:
        raise UsageError(
            f"mesh={mesh!r:.60}: has {places:,} place{'s' * (places != 1)} for {processes:,} "
            f"process{'es' * (processes != 1)}, expected one for each",
            help=f"torchrun --nproc-per-node {places}, or another mesh",
            argument="mesh",
        )
    return sizes
