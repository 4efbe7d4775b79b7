"""Roles of a transformer's matrices by their names and the names of the modules around them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from torch import nn

from bowline.recipes import Role

__all__ = ["embedding_role", "is_norm", "matrix_role"]

ATTENTION, FEED_FORWARD, CLASSIFIER, TRANSFORM = "attention", "feed-forward", "classifier", "transform"
PLACES = {
    ATTENTION: re.compile(r"attn|attention|^mha$", re.IGNORECASE),
    FEED_FORWARD: re.compile(r"mlp|ffn|feed_?forward|dense_?relu_?dense|^ff$", re.IGNORECASE),
    CLASSIFIER: re.compile(r"classif|pooler", re.IGNORECASE),
    TRANSFORM: re.compile(r"^(transform|(\w+_)?predictions|lm_head)$", re.IGNORECASE),
}
"""Kinds of module by name; the module nearest to a matrix decides what the matrix is part of."""


def _named(*roles: tuple[Role, str]) -> dict[str, Role]:
    return {name: role for role, names in roles for name in names.split()}


ANYWHERE = _named(
    (Role.QUERY, "query q_proj query_proj q_lin q_attn to_q c_q wq"),
    (Role.KEY, "key k_proj key_proj k_lin to_k c_k wk"),
    (Role.VALUE, "value v_proj value_proj v_lin to_v c_v wv"),
    (Role.ATTENTION_OUT, "o_proj out_lin"),
    (Role.FEED_FORWARD_IN, "wi wi_0 wi_1 c_fc fc1 lin1 linear1 ffn dense_h_to_4h gate_proj up_proj intermediate.dense"),
    (Role.FEED_FORWARD_OUT, "fc2 lin2 linear2 ffn_output dense_4h_to_h down_proj"),
)
WITHIN: Mapping[str | None, Mapping[str, Role]] = {
    ATTENTION: _named(
        (Role.QUERY, "q"),
        (Role.KEY, "k"),
        (Role.VALUE, "v"),
        (Role.ATTENTION_OUT, "o wo Wo out_proj c_proj dense output.dense to_out proj out"),
    ),
    FEED_FORWARD: _named(
        (Role.FEED_FORWARD_IN, "fc_in w1 w3 Wi"),
        (Role.FEED_FORWARD_OUT, "wo Wo fc_out c_proj w2 output.dense"),
    ),
    CLASSIFIER: _named((Role.CLASSIFIER, "dense out_proj classifier")),
    TRANSFORM: _named((Role.TRANSFORM, "dense")),
    None: _named(
        (Role.FEED_FORWARD_OUT, "output.dense"),
        (Role.TRANSFORM, "vocab_transform"),
        (Role.PROJECTION, "project_in project_out projection embedding_hidden_mapping_in embeddings_project"),
        (Role.CLASSIFIER, "classifier pre_classifier seq_relationship score qa_outputs pooler"),
    ),
}

TOKENS = re.compile(
    r"wte|embed_tokens|word_embed\w*|word_embeddings|tok(en)?_emb\w*|shared|embed_in|emb|embed(ding)?s?|lookup"
)
RELATIVE = re.compile(r"relative")
POSITIONS = re.compile(r"wpe|(.*_)?pos(ition)?(al)?s?(_.*)?")
TYPES = re.compile(r"token_type.*|segment.*")
NORM = re.compile(r"norm(?!ali[sz])|^ln(_|\d|$)|_ln$", re.IGNORECASE)


def embedding_role(leaf: str) -> Role | None:
    """The role of a table, by its name alone."""
    if RELATIVE.search(leaf):
        return Role.RELATIVE_BIAS
    if POSITIONS.fullmatch(leaf):
        return Role.POSITIONS
    if TYPES.fullmatch(leaf):
        return Role.TOKEN_TYPES
    return Role.INPUT_EMBEDDING if TOKENS.fullmatch(leaf) else None


def is_norm(leaf: str, module: nn.Module) -> bool:
    """Whether a module's class or name says that it is a norm."""
    return NORM.search(type(module).__name__) is not None or NORM.search(leaf) is not None


def matrix_role(parts: Sequence[str]) -> Role | None:
    """The role of a matrix, by the names from the root to its module, without numbers.

    Example:
        >>> matrix_role("encoder layer attention output dense".split())
        <Role.ATTENTION_OUT: 'attention out'>
        >>> matrix_role("encoder layer output dense".split())
        <Role.FEED_FORWARD_OUT: 'feed-forward out'>
    """
    leaf, both = parts[-1] if parts else "", ".".join(parts[-2:])
    place = place_of(parts[:-1])
    for names in (WITHIN[place], ANYWHERE):
        for name in (both, leaf):
            if name in names:
                return names[name]
    return None


def place_of(parts: Sequence[str]) -> str | None:
    """The kind of the nearest of these modules whose name has a kind."""
    for part in reversed(parts):
        for place, pattern in PLACES.items():
            if pattern.search(part):
                return place
    return None
