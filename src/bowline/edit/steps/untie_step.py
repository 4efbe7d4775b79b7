"""Unties on disk: the head gets its own copy, the flag says so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from bowline.checkpoint.checkpoint import CONFIG
from bowline.edit.content import Content
from bowline.edit.draft import Draft
from bowline.edit.head_scale import scale_when_untied
from bowline.edit.row_selection import refuse_quantised
from bowline.edit.steps.tie_step import made_ties
from bowline.errors import TieError
from bowline.families.flag_paths import flag_paths
from bowline.families.quirks import quirks_of
from bowline.families.transformers_table import lookup
from bowline.tie import Tie

__all__ = ["UntieStep"]


@dataclass(frozen=True, slots=True)
class UntieStep:
    """Store a copy for each tie that ends with the flag, and clear the flag at every level."""

    verb: ClassVar[str] = "untie"

    def __str__(self) -> str:
        return "untie"

    def apply(self, draft: Draft) -> Draft:
        """The draft with a matrix for each end.

        Raises:
            TieError: there is no tie to undo, transformers makes it whatever the config says, or an end is quantised.
        """
        declaration, config = draft.declaration, draft.config
        head = declaration.find(declaration.head) if declaration.head else None
        if head is None:
            raise TieError(
                f"{declaration.architecture or 'this model'} declares no tie of its head, so there is nothing to untie",
                help="`bowline audit` shows what it declares",
            )
        quirks = quirks_of(declaration.family)
        if quirks.shares_layers:
            raise TieError(
                f"{declaration.architecture}: the flag also ties layers, which would have to be stored twice",
                help="untie the live model: bowline.untie_weights",
            )
        refuse_quantised(draft, ())
        paths = flag_paths(declaration, config, {head.tie.target})
        edited = draft.with_values(
            CONFIG, {tuple(path.split(".")): False for path in paths if lookup(config, path) is not False}
        )
        before, after = draft.declaration.made, edited.declaration.made
        ended = dict.fromkeys(tie for loader, made in before.items() for tie in made if tie not in after[loader])
        copied = []
        beside = [Tie(target, source) for target, source in quirks.ties_beside.items()]
        for tie in dict.fromkeys([head.tie, *ended, *beside]):
            source = edited.tensors.get(tie.source)
            if tie.target not in edited.tensors and source is not None:
                _refuse_other_length(edited, tie, source)
                edited = edited.with_tensor(tie.target, source, edited.homes[tie.source])
                copied.append(tie.target)
        if not copied and edited.texts == draft.texts:
            return draft.with_notes("it is untied already")
        if head.tie.target not in edited.tensors:
            raise TieError(f"{head.tie}: neither is stored", help="fetch the checkpoint again: it has no embedding")
        if head.tie.target not in copied:
            return edited
        edited = scale_when_untied(draft, edited, head.tie.target)
        if edited.tensors[head.tie.target] is edited.tensors[head.tie.source] and _still_made(edited, head.tie):
            raise TieError(
                f"{head.tie}: {max(declaration.made).replace('-', ' ')} makes this tie whatever the config says, as "
                "long as the two ends are equal",
                help="untie the live model (bowline.untie_weights), train its head, and save it",
            )
        return edited


def _refuse_other_length(draft: Draft, tie: Tie, source: Content) -> None:
    """Raise if an untied target has another number of rows than its source (ImageGPT: no row for its first token)."""
    lengths = draft.declaration.expected_lengths
    expected = lengths[max(lengths)] if lengths else {}
    if tie.target in expected and expected[tie.target] != source.rows == expected.get(tie.source, source.rows):
        raise TieError(
            f"{tie}: untied, the target has {expected[tie.target]} rows and the source {source.rows}: no copy fits",
            help="keep it tied",
        )


def _still_made(draft: Draft, tie: Tie) -> bool:
    return any(made.target == tie.target for made in made_ties(draft))
