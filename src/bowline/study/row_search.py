"""The row nearest to a vector, by product, by cosine and by distance: how often the three are one row."""

from __future__ import annotations

import torch

__all__ = ["searches"]

BLOCK = 512
"""Queries at a time."""


@torch.no_grad()
def searches(
    queries: torch.Tensor, table: torch.Tensor, right: torch.Tensor | None = None, *, but: torch.Tensor | None = None
) -> dict[str, float]:
    """Shares of the queries (N, D) whose best row of `table` (V, D) is the same in two searches.

    The product's best row is argmax_i h . e_i, the cosine's argmax_i cos(h, e_i), the distance's argmin_i ||h - e_i||.
    `right` (N,) are rows that should be found, and the shares that find them are given too; `but` (N,) are rows that
    are left out, each query's own where the queries are rows themselves. In float64, where ties are rare.

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
            "cosine": product / norms.clamp_min(1e-30),  # the query's own norm changes no order
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
