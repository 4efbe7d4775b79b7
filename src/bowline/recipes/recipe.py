"""A recipe: the initial distribution of each role in a language model, and the multipliers that go with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType

from bowline.errors import UsageError
from bowline.recipes.distribution import Distribution, Scale, constant

__all__ = ["Recipe", "Role"]


class Role(StrEnum):
    """The purpose of a tensor. A recipe without an entry for a role uses its entry for the role's `base`."""

    INPUT_EMBEDDING = "input embedding"
    POSITIONS = "positions"
    TOKEN_TYPES = "token types"
    HEAD = "head, untied"
    LINEAR = "any other matrix"
    QUERY = "query"
    KEY = "key"
    VALUE = "value"
    ATTENTION_OUT = "attention out"
    FEED_FORWARD_IN = "feed-forward in"
    FEED_FORWARD_OUT = "feed-forward out"
    TRANSFORM = "head's transform"
    PROJECTION = "projection"
    CLASSIFIER = "pooler, classifier"
    RECURRENT = "recurrent"
    RELATIVE_BIAS = "relative bias"
    NORM_WEIGHT = "norm weight"
    NORM_BIAS = "norm bias"
    BIAS = "bias"
    HEAD_BIAS = "head's bias"
    RECURRENT_BIAS = "recurrent bias"

    @property
    def base(self) -> Role | None:
        """The role whose distribution is used if the recipe has none for this one."""
        return _BASES.get(self)


_BASES = {
    Role.POSITIONS: Role.INPUT_EMBEDDING,
    Role.TOKEN_TYPES: Role.POSITIONS,
    Role.HEAD: Role.LINEAR,
    Role.QUERY: Role.LINEAR,
    Role.KEY: Role.LINEAR,
    Role.VALUE: Role.LINEAR,
    Role.ATTENTION_OUT: Role.LINEAR,
    Role.FEED_FORWARD_IN: Role.LINEAR,
    Role.FEED_FORWARD_OUT: Role.LINEAR,
    Role.TRANSFORM: Role.LINEAR,
    Role.PROJECTION: Role.LINEAR,
    Role.CLASSIFIER: Role.LINEAR,
    Role.RECURRENT: Role.LINEAR,
    Role.RELATIVE_BIAS: Role.INPUT_EMBEDDING,
    Role.HEAD_BIAS: Role.BIAS,
    Role.RECURRENT_BIAS: Role.BIAS,
}
_UNSAID = {Role.NORM_WEIGHT: constant(1.0), Role.NORM_BIAS: constant(0.0), Role.BIAS: constant(0.0)}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """An initialisation: a distribution for each role, and the model's multipliers.

    A table of std 1 is right if the logits are multiplied by d^-1/2, and 27.7 times too large (at d = 768) if not: so
    the multipliers are part of the recipe. `expected_loss` predicts the first loss, and `bowline.nn.init_weights`
    draws the weights.

    Args:
        name: the key in `RECIPES`, also used on the command line.
        title: a short description.
        source: the source of the numbers: a file of a repository, or a paper.
        roles: a distribution for each role; see `Role` for roles without one.
        families: the model types that the recipe was made for.
        embed_scale: the multiplier of looked-up embeddings.
        logit_scale: the multiplier of logits if the head is tied; an untied head has the scale in its draw.
        zero_padding: whether the padding row starts at 0.
        ties: the heads that the recipe is for: tied, untied, or both.
    """

    name: str
    title: str
    source: str
    roles: Mapping[Role, Distribution]
    families: tuple[str, ...] = ()
    embed_scale: Scale = field(default_factory=Scale)
    logit_scale: Scale = field(default_factory=Scale)
    zero_padding: bool = False
    ties: tuple[bool, ...] = (True, False)

    def __post_init__(self) -> None:
        if not isinstance(self.roles, Mapping):
            raise UsageError(f"recipe {self.name!r}: roles={self.roles!r:.60}, expected {{Role: Distribution}}")
        for role, how in self.roles.items():
            if role not in set(Role) or not isinstance(how, Distribution):
                raise UsageError(
                    f"recipe {self.name!r}: {role!r:.60} as {how!r:.60}, expected a Role and a Distribution"
                )
        for what in ("embed_scale", "logit_scale"):
            if not isinstance(getattr(self, what), Scale):
                raise UsageError(f"recipe {self.name!r}: {what}={getattr(self, what)!r:.60}, expected a Scale")
        lacking = [role for role in (Role.INPUT_EMBEDDING, Role.LINEAR) if role not in self.roles]
        if lacking:
            raise UsageError(
                f"recipe {self.name!r}: has no distribution for {str(lacking[0])!r}", help="add one to its roles"
            )
        object.__setattr__(self, "roles", MappingProxyType({Role(role): how for role, how in self.roles.items()}))

    def of(self, role: Role) -> Distribution:
        """The distribution of this role.

        Example:
            >>> from bowline.recipes import RECIPES
            >>> print(RECIPES["transformers-gpt2"].of(Role.ATTENTION_OUT))
            N(0, 0.02 (2 L)^-1/2)
        """
        if role in self.roles:
            return self.roles[role]
        return self.of(role.base) if role.base is not None else _UNSAID[role]

    def logits_by(self, tied: bool) -> Scale:
        """The multiplier of the logits."""
        return self.logit_scale if tied else Scale()
