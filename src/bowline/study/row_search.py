"""Nearest-row search by product, by cosine and by distance, and how often the three agree."""

from __future__ import annotations

import torch

__all__ = ["searches"]

BLOCK = 512
"""The number of queries that are searched at a time."""


@torch.no_grad()
def searches(
    queries: torch.Tensor, table: torch.Tensor, right: torch.Tensor | None = None, *, but: torch.Tensor | None = None
) -> dict[str, float]:
    """Return the shares of the queries (N, D) for which two searches find the same best row of `table` (V, D).

    The product's best row is argmax_i h . e_i, the cosine's argmax_i cos(h, e_i), the distance's argmin_i ||h - e_i||.
    If the expected rows `right` (N,) are given, the result has each search's share of hits too. The rows `but` (N,) are
    excluded, such as each query's own row. Scores are computed in float64, in which ties are rare.

    Example:
        >>> table = torch.tensor([[1.0, 0.0], [0.0, 3.0]])
        >>> found = searches(torch.tensor([[1.0, 0.5], [0.1, 2.0]]), table)
        >>> found["product_is_cosine"], found["cosine_is_distance"]
        (0.5, 1.0)
    """
    table = table.detach().double()
    norms = table.norm(dim=1)
    found: dict[str, list[torch.Tensor]] = {"product": [], "cosine": [], "distance": []}
    for start in range(0, len(queries), BLOCK):
        block = queries[start : start + BLOCK].detach().double()
        product = block @ table.T
        scores = {
            "product": product,
            "cosine": product / norms.clamp_min(1e-30),  # the query's own norm does not change the order
            "distance": product - norms**2 / 2,  # ||h - e||^2 = ||h||^2 - 2 (h . e - ||e||^2 / 2)
        }
        for name, score in scores.items():
            if but is not None:
                score[torch.arange(len(block)), but[start : start + BLOCK]] = -torch.inf
            found[name].append(score.argmax(dim=1))
    best = {name: torch.cat(parts) for name, parts in found.items()}
    shares = {
        "product_is_cosine": _share(best["product"] == best["cosine"]),
        "product_is_distance": _share(best["product"] == best["distance"]),
        "cosine_is_distance": _share(best["cosine"] == best["distance"]),
        "norm_spread": float(norms.std() / norms.mean()),
    }
    if right is not None:
        shares |= {f"{name}_right": _share(best[name] == right) for name in best}
    return shares


def _share(hits: torch.Tensor) -> float:
    return float(hits.double().mean())
