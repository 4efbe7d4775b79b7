"""The report of `init_weights`: each tensor's name and the distribution that it was drawn from."""

from __future__ import annotations

import re
from dataclasses import dataclass

from bowline.recipes import Distribution, Role
from bowline.wording import listed

__all__ = ["Drawn", "InitReport"]


@dataclass(frozen=True, slots=True)
class Drawn:
    """A tensor, or a part of a fused one, that was drawn: `mean` and `std` are of the distribution in this model."""

    name: str
    role: Role
    distribution: Distribution
    mean: float
    std: float


@dataclass(frozen=True, kw_only=True)
class InitReport:
    """The tensors that `init_weights` has drawn, in the order of the model.

    `seed` draws the same again. `embed_scale` and `logit_scale` are what the model multiplies by now, `None` where it
    has no table or no head; `tied` whether the head is the table.
    """

    recipe: str
    seed: int
    drawn: tuple[Drawn, ...]
    embed_scale: float | None
    logit_scale: float | None
    tied: bool | None

    def __getitem__(self, name: str) -> Drawn:
        """The distribution of tensor `name`; for a fused tensor, of its first part."""
        for one in self.drawn:
            if one.name == name:
                return one
        raise KeyError(name)

    def __str__(self) -> str:
        alike: dict[tuple[Role, str, float, float], list[str]] = {}
        for one in self.drawn:
            names = alike.setdefault((one.role, str(one.distribution), one.mean, one.std), [])
            names.append(re.sub(r"\b\d+\b", "*", one.name))
        rows = []
        for (role, how, _, std), names in alike.items():
            distinct = list(dict.fromkeys(names))
            rows.append((str(role), how, f"{std:.4g}" if std else "", listed(distinct, limit=2)))
        widths = [max(len(row[at]) for row in [("role", "drawn from", "std"), *rows]) for at in range(3)]
        lines = [
            "  ".join([*(text.ljust(width) for text, width in zip(row, widths, strict=False)), row[3]]).rstrip()
            for row in [("role", "drawn from", "std", "where"), *rows]
        ]
        return "\n".join([f"{self.recipe}, seed {self.seed}: {self._multiplied()}", *lines])

    def _multiplied(self) -> str:
        parts = [] if self.embed_scale is None else [f"embeddings times {self.embed_scale:.4g}"]
        if self.logit_scale is not None:
            parts.append(f"logits times {self.logit_scale:.4g}, {'tied' if self.tied else 'untied'}")
        return ", ".join(parts) or "no input embedding and no head"
