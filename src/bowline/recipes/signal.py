"""Predicts the cosine of a hidden state with its input's embedding in an untrained model, which a tied head sees.

With independent random weights of mean 0, the output of a block is independent of the token's own embedding: the
embedding stays in the residual stream, and everything else dilutes it. So it is enough to compute the stream's
covariance between positions, K[s, t] = E x_s . x_t / d, through the layers, as for networks of infinite width (Neal,
1994; Yang, 2019, for attention):

    attention      K += d_a s_o² E[A (d s_v² N) Aᵀ],   A = softmax of Gaussian scores of covariance c N ⊗ N
    feed-forward   K += d_ff s_out² k(N),               k the activation's kernel, gated: times d s_up² N
    norm           N = K / sqrt(diag K diag Kᵀ),        before each part, or (post-norm) of the sum; Gemma 2 and 3
                                                        also normalise what a part adds

and the share of the embedding a s / sqrt(K[t, t]), which is the cosine of the hidden state and the embedding.
Positions that see few others are diluted differently, so each position is computed separately.

Not modelled: biases (0 in every recipe but torch's), T5's relative bias (small beside its scores), repeated tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bowline.recipes import activations
from bowline.recipes.architecture import Architecture
from bowline.recipes.recipe import Recipe, Role

__all__ = ["Signal", "propagate"]

Floats = npt.NDArray[np.float64]
SAMPLES = 24
"""Number of draws of the attention scores, the only sampled quantity; the seed is fixed."""


@dataclass(frozen=True)
class Signal:
    """The head's input at each position (T,): the norm of h, and cos(h, e) with the input's own embedding."""

    norm: Floats
    similarity: Floats


def propagate(model: Architecture, recipe: Recipe, embed_scale: float, length: int) -> Signal:
    """The signal of `length` different tokens after a model that is drawn by the recipe."""
    if model.recurrent:
        return _recurrent(model, recipe, embed_scale, length)
    draw = _Stds(model, recipe)
    own = embed_scale * draw(Role.INPUT_EMBEDDING)  # std of the embedding in the stream, at each position
    eye = np.eye(length)
    stream = own**2 * eye
    memory = None
    if model.encoder_layers:
        memory = _normed(_stack(model, draw, stream, np.ones(length), model.encoder_layers, causal=False)[0])[0]
    if model.positions:
        stream = stream + draw(Role.POSITIONS) ** 2 * eye
    if model.token_types:
        stream = stream + draw(Role.TOKEN_TYPES) ** 2
    share = np.full(length, own)
    if model.post_norm:  # these models normalise the embeddings
        stream, lengths = _normed(stream)
        share = share / lengths
    stream, share = _stack(model, draw, stream, share, model.num_layers, causal=model.causal, memory=memory)
    similarity = share / np.sqrt(np.diag(stream))
    gain = recipe.of(Role.NORM_WEIGHT).mean(model.sizes)
    if model.transform:  # a random matrix: h is independent of e, and has the width of the table
        return Signal(np.full(length, gain * math.sqrt(model.embedding_size)), np.zeros(length))
    return Signal(np.full(length, gain * math.sqrt(model.hidden_size)), similarity)


class _Stds:
    """Gives the standard deviation of each role in a model of these sizes."""

    def __init__(self, model: Architecture, recipe: Recipe) -> None:
        self.model, self.recipe = model, recipe
        d, inner, ff = model.hidden_size, model.num_heads * model.head_size, model.intermediate_size
        ends = {
            Role.QUERY: (d, inner),
            Role.KEY: (d, inner),
            Role.VALUE: (d, inner),
            Role.ATTENTION_OUT: (inner, d),
            Role.FEED_FORWARD_IN: (d, ff),
            Role.FEED_FORWARD_OUT: (ff, d),
            Role.INPUT_EMBEDDING: (model.embedding_size, model.vocab_size),
            Role.PROJECTION: (d, model.embedding_size),
            Role.RECURRENT: (d, 4 * d),
            Role.RECURRENT_BIAS: (d, 4 * d),
        }
        self.sizes = {role: model.sizes_of(*both) for role, both in ends.items()}

    def __call__(self, role: Role) -> float:
        return self.recipe.of(role).std(self.sizes.get(role) or self.model.sizes_of(self.model.hidden_size, 1))


def _normed(stream: Floats) -> tuple[Floats, Floats]:
    lengths = np.sqrt(np.diag(stream))
    return stream / np.outer(lengths, lengths), lengths


def _stack(
    model: Architecture,
    draw: _Stds,
    stream: Floats,
    share: Floats,
    layers: int,
    *,
    causal: bool,
    memory: Floats | None = None,
) -> tuple[Floats, Floats]:
    """The stream's covariance and the embedding's share in it, after the layers."""
    d, inner = model.hidden_size, model.num_heads * model.head_size
    gain = draw.recipe.of(Role.NORM_WEIGHT).mean(model.sizes) ** 2
    queries, keys = d * draw(Role.QUERY) ** 2, d * draw(Role.KEY) ** 2
    if model.query_norm:
        queries = keys = 1.0
    scores = model.score_scale**2 * model.head_size * queries * keys * gain**2
    values = inner * draw(Role.ATTENTION_OUT) ** 2 * d * draw(Role.VALUE) ** 2 * gain
    into = d * draw(Role.FEED_FORWARD_IN) ** 2 * gain
    out = model.intermediate_size * draw(Role.FEED_FORWARD_OUT) ** 2
    random = np.random.default_rng(0)
    parts = ["self", "cross", "feed-forward"] if memory is not None else ["self", "feed-forward"]
    for _ in range(layers):
        for part in parts:
            normed = stream / gain if model.post_norm else _normed(stream)[0]
            if part == "feed-forward":
                added = out * activations.kernel(model.activation, into, normed)
                added = added * (into * normed) if model.gated else added
            else:
                seen = memory if part == "cross" and memory is not None else normed
                hides = causal and part == "self"
                added = values * _mixed(normed, seen, scores, model.score_cap, causal=hides, random=random)
            stream = stream + (gain * _normed(added)[0] if model.branch_norm else added)
            if model.post_norm:
                stream, lengths = _normed(stream)
                stream, share = stream * gain, share / lengths * math.sqrt(gain)
    return stream, share


def _mixed(
    queries: Floats, keys: Floats, variance: float, cap: float | None, *, causal: bool, random: np.random.Generator
) -> Floats:
    """E[A keys Aᵀ] over scores with the given variance and the covariance queries ⊗ keys, below a softcap."""
    shape = len(queries), len(keys)
    hidden = np.triu(np.ones(shape, dtype=bool), 1) if causal else np.zeros(shape, dtype=bool)
    left, right = (np.linalg.cholesky(one + 1e-9 * np.eye(len(one))) for one in (queries, keys))
    total = np.zeros((len(queries), len(queries)))
    count = SAMPLES if variance > 1e-4 else 1
    for _ in range(count):
        scores = math.sqrt(variance) * (left @ random.standard_normal(shape) @ right.T)
        if cap is not None:
            scores = cap * np.tanh(scores / cap)
        scores[hidden] = -np.inf
        weights = np.exp(scores - scores.max(1, keepdims=True))
        weights /= weights.sum(1, keepdims=True)
        total += weights @ keys @ weights.T
    return total / count


def _recurrent(model: Architecture, recipe: Recipe, embed_scale: float, length: int) -> Signal:
    """The signal of an LSTM: the mean square of h from gates that see Gaussians; h is independent of e."""
    draw = _Stds(model, recipe)
    matrix, bias = draw(Role.RECURRENT), draw(Role.RECURRENT_BIAS)
    inputs = np.full(length, (embed_scale * draw(Role.INPUT_EMBEDDING)) ** 2)
    read = model.embedding_size
    for layer in range(model.num_layers):
        last = layer == model.num_layers - 1
        wide = model.hidden_size if model.projected or not last else model.embedding_size
        cell = hidden = 0.0
        outputs = np.empty(length)
        for step in range(length):
            variance = matrix**2 * (read * inputs[step] + wide * hidden) + 2 * bias**2
            gate = activations.mean_square("sigmoid", variance)
            cell = gate * (cell + activations.mean_square("tanh", variance))
            hidden = outputs[step] = gate * activations.mean_square("tanh", cell)
        inputs, read = outputs, wide
    if model.projected:
        inputs, read = read * draw(Role.PROJECTION) ** 2 * inputs, model.embedding_size
    return Signal(np.sqrt(read * inputs), np.zeros(length))
