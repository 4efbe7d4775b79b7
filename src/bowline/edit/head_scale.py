"""T5's scale on disk: the flag also decides whether the decoder's output is multiplied by d_model^-1/2.

Which family asks what is in `bowline.families.quirks`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from bowline.checkpoint.checkpoint import CONFIG
from bowline.edit.content import Content, Scaled
from bowline.edit.draft import Draft
from bowline.errors import TieError
from bowline.families.quirks import ScaledBy, quirks_of

__all__ = ["logit_scale", "scale_when_tied", "scale_when_untied", "scaled_source"]

KEY = ScaledBy.OWN_KEY.value
FLAG = ScaledBy.FLAG.value


def scale_when_untied(before: Draft, after: Draft, head: str) -> Draft:
    """The untied draft with the scale in the head's own copy: the form of T5 v1.1, which every version reads alike.

    Where transformers 5 scales by nothing that the config says, the copy stays as it is, and a note says what
    transformers 4 makes of it.
    """
    asked = quirks_of(before.declaration.family).scaled_by
    if not asked:
        return after
    if asked.get(5) in (ScaledBy.FLAG, ScaledBy.OWN_KEY):
        if not _scales(before.config, asked[5]):
            return after
        factor = 1 / math.sqrt(_width(before))
        after = after.with_tensor(head, Scaled(after.tensors[head], factor), after.homes[head])
        if asked[5] is ScaledBy.OWN_KEY:
            after = after.with_values(CONFIG, {(KEY,): False})
        return after.with_notes(f"{head} holds the embedding times {factor:.6g}: the logits' scale, which the flag was")
    if asked.get(4) is ScaledBy.FLAG and before.config.get(FLAG, True) is not False:
        return after.with_notes(
            "transformers 4 scales the logits by the flag alone: there they grow by the square root of d_model"
        )
    return after


def scaled_source(draft: Draft, source: str) -> Content | None:
    """What an untied head holds that carries the scale itself: the embedding times d_model^-1/2; else `None`."""
    asked = quirks_of(draft.declaration.family).scaled_by.get(5)
    if asked not in (ScaledBy.FLAG, ScaledBy.OWN_KEY) or _scales(draft.config, asked):
        return None
    return Scaled(draft.tensors[source], 1 / math.sqrt(_width(draft)))


def logit_scale(draft: Draft) -> float:
    """The factor by which transformers 5 multiplies the decoder's output in front of the head; 1 for most families."""
    asked = quirks_of(draft.declaration.family).scaled_by.get(5, ScaledBy.NEVER)
    return 1 / math.sqrt(_width(draft)) if asked is ScaledBy.NOTHING or _scales(draft.config, asked) else 1.0


def scale_when_tied(before: Draft, after: Draft, *, carried: bool) -> Draft:
    """The tied draft, with the logits' scale that it had before where a key can say so.

    `carried` means that the head that was dropped held the scale itself, so that the flag has to bring it back.

    Raises:
        TieError: only the flag decides about the scale, and setting it would change the logits in every version.
    """
    asked = quirks_of(before.declaration.family).scaled_by
    if not asked or after.config.get(FLAG) is before.config.get(FLAG, True):
        return after
    scaled = carried or _scales(before.config, asked.get(5, ScaledBy.NEVER))
    if carried and asked.get(5) is ScaledBy.OWN_KEY:
        return after.with_values(CONFIG, {(KEY,): True})
    if asked.get(5) is ScaledBy.FLAG and not scaled:
        raise TieError(
            "the flag would also scale the logits by d_model^-1/2, in every version of transformers",
            help="keep it untied",
        )
    if asked.get(5) is ScaledBy.OWN_KEY and not scaled:
        after = after.with_values(CONFIG, {(KEY,): False})
    if asked.get(4) is ScaledBy.FLAG and before.config.get(FLAG, True) is False and not carried:
        after = after.with_notes(
            "transformers 4 scales the logits of a tied head by d_model^-1/2, and no key stops it: load it with 5"
        )
    return after


def _scales(config: Mapping[str, Any], asked: ScaledBy) -> bool:
    flag = config.get(FLAG, True) is not False
    if asked is ScaledBy.OWN_KEY:
        return bool(config.get(KEY, flag))
    return flag if asked is ScaledBy.FLAG else False


def _width(draft: Draft) -> int:
    width = draft.config.get("d_model") or draft.config.get("hidden_size")
    assert isinstance(width, int)
    return width
