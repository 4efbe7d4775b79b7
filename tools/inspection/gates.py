"""How the flags of a configuration decide a tie: a truth table, and its shortest description."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

from tools.inspection.configurations import FLAG, flat
from tools.inspection.models import Setting, in_every_setting
from tools.inspection.ties import Pair, is_tied
from tools.tiny import Json

Truth = dict[Setting, bool]
"""Whether a pair is tied, by the setting of the flags."""


def without_detours(truth: dict[Pair, Truth]) -> dict[Pair, Truth]:
    """`truth` without the pairs that follow from two others: a <- c follows from a <- b and b <- c."""

    def follows(target: str, source: str) -> bool:
        for other, middle in truth:
            if other == target and (middle, source) in truth:
                first, second = truth[target, middle], truth[middle, source]
                if truth[target, source] == {setting: tied and second[setting] for setting, tied in first.items()}:
                    return True
        return False

    return {pair: table for pair, table in truth.items() if any(table.values()) and not follows(*pair)}


def _by_rule(rule: str, present: list[bool], default: bool) -> bool:
    if not present:
        return default
    return present[0] if rule == "first" else any(present) if rule == "any" else all(present)


def gate(paths: list[str], truth: Truth) -> Json:
    """The shortest description of a truth table over flags: see `bowline.families` for how it is read."""
    relevant = [
        i
        for i in range(len(paths))
        if any(
            len({truth[s] for s in ((*k[:i], v, *k[i + 1 :]) for v in (True, False, None)) if s in truth}) > 1
            for k in truth
        )
    ]
    default = truth[(None,) * len(paths)]
    if not relevant:
        return {"paths": [], "default": default}
    reduced = {
        tuple(setting[i] for i in relevant): tied
        for setting, tied in truth.items()
        if all(setting[i] is None for i in range(len(paths)) if i not in relevant)
    }
    if len(relevant) == 1 and reduced.get((True,)) and not reduced.get((False,)):
        return {"paths": [paths[relevant[0]]], "default": default}
    for rule in ("first", "any", "all"):
        for order in itertools.permutations(range(len(relevant))):
            if len(relevant) > 1 and all(
                tied == _by_rule(rule, [s[i] for i in order if s[i] is not None], default)  # type: ignore[misc]
                for s, tied in reduced.items()
            ):
                return {"paths": [paths[relevant[i]] for i in order], "rule": rule, "default": default}
    letters = {True: "T", False: "F", None: "-"}
    table = {"".join(letters[value] for value in setting): tied for setting, tied in reduced.items()}
    return {"paths": [paths[i] for i in relevant], "rule": "table", "table": table, "default": default}


def flat_gates(cls: type[Any], content: Json, pairs: Iterable[Pair]) -> dict[Pair, Json]:
    """The gate of each pair in a `config.json` of the flat layout; empty where the family does not read it."""
    merged = flat(cls, content)
    if merged is None:
        return {}
    models = in_every_setting(cls, merged, [FLAG])
    return {pair: gate([FLAG], {setting: is_tied(model, *pair) for setting, model in models.items()}) for pair in pairs}
