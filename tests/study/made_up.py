"""Numbers that nobody measured, in the shape that each question has: what is said of them is known beforehand."""

from __future__ import annotations

import copy
from typing import Any

__all__ = ["NUMBERS", "changed"]


def _looks(steps: list[int], **curves: list[float]) -> list[dict[str, Any]]:
    return [{"step": step, **{key: curve[at] for key, curve in curves.items()}} for at, step in enumerate(steps)]


def _near(value: float) -> list[float]:
    """Three seeds whose error is a hundredth of the value."""
    return [0.99 * value, value, 1.01 * value]


def _flag_row(family: str) -> dict[str, Any]:
    table, rest = 1000 * 10, 5000
    one = {"weight_bytes": 4 * (table + rest), "gradient_bytes": 4 * (table + rest)}
    two = {"weight_bytes": 4 * (2 * table + rest), "gradient_bytes": 4 * (2 * table + rest)}
    return {
        "family": family,
        "vocab_size": 1000,
        "hidden_size": 10,
        "whole": {"tied": 75_000_000, "untied": 100_000_000, "table": 25_000_000},
        "tied": {**one, "optimizer_bytes": 8 * (table + rest), "bytes_on_disk": 4 * (table + rest) + 900},
        "untied": {**two, "optimizer_bytes": 8 * (2 * table + rest), "bytes_on_disk": 4 * (2 * table + rest) + 950},
        "gradient": {
            "relative_error": 2e-7,
            "input": 1.0,
            "output": 2.0,
            "head_factor": 0.1 if family == "t5" else 1.0,
        },
    }


def _first(recipe: str, tied: bool, loss: float) -> dict[str, Any]:
    fixed = {"error": 0.1, "uniform": 10.0, "logit_std": 1.0, "predicted": loss}
    return {"recipe": recipe, "tied": tied, "measured": loss, **fixed}


def _trained(end: float) -> list[dict[str, Any]]:
    return [{"looks": _looks([0, 10], held_out=[12.0, value])} for value in _near(end)]


def _search(product: float, right: float, cosine_right: float) -> dict[str, float]:
    return {
        "product_is_cosine": product,
        "product_is_distance": product,
        "cosine_is_distance": product,
        "product_right": right,
        "cosine_right": cosine_right,
        "distance_right": cosine_right,
        "norm_spread": 0.2,
    }


def _searches(product: float, right: float, cosine_right: float) -> dict[str, Any]:
    shares = zip(_near(product), _near(right), _near(cosine_right), strict=True)
    return {"steps": [0, 10], "seeds": [[_search(0.5, 0.0, 0.0), _search(*some)] for some in shares]}


def _table(start: float, end: float) -> dict[str, list[list[float]]]:
    keys = ("identity_distance", "participation_ratio", "mean_cosine")
    return {
        "tight_frame_distance": [[start, value] for value in _near(end)],
        "self_decoding": [[1.0, 0.5]] * 3,
        **{key: [[0.98, 0.99]] * 3 for key in keys},
    }


def _arm(parameters: int, width: int, end: float) -> dict[str, Any]:
    return {"parameters": parameters, "width": width, "held_out": [[8.0, value] for value in _near(end)]}


def _split(output: float, cosine: float) -> dict[str, float]:
    return {"output": output, "input": 1.0, "total": output + 1, "cosine": cosine}


def _moved(hidden: float, table: float, worse: float) -> dict[str, Any]:
    looks = _looks([0, 10], special=[4.0, 3.0], general=[4.0, 4.0 + worse])
    return {"looks": looks, "input": table, "head": 0.3, "hidden": hidden}


def _bert(apart: float, cloned: float, again: float) -> dict[str, Any]:
    head = {
        "transform_parameters": 420,
        "bias_parameters": 1000,
        "same_without_bias": 0.9,
        "same_without_transform": 0.1,
        "bias_follows_frequency": 0.6,
    }
    shared = _looks([0, 10], held_out=[5.0, 4.0], distance=[0.0, 0.0], cosine=[1.0, 1.0])
    own = _looks([0, 10], held_out=[5.0, cloned], distance=[0.0, apart], cosine=[1.0, 0.9])
    return {"shared": {"looks": shared}, "cloned": {"looks": own, "tied_again": again}, "head": head}


def _padding(norm: float, chance: float, loss: float) -> dict[str, Any]:
    looks = _looks([0, 10], input_norm=[0.0, norm], median_norm=[0.2, 0.3], chance=[1e-3, chance])
    return {"looks": looks, "held_out": loss, "labels_that_are_padding": 0}


NUMBERS: dict[str, dict[str, Any]] = {
    "flag": {"rows": [_flag_row("bert"), _flag_row("gpt2"), _flag_row("t5")]},
    "t5-init": {
        "vocab_size": 1000,
        "hidden_size": 10,
        "layers": 2,
        "rows": [
            _first("transformers-t5", True, 10.5),
            _first("transformers-t5", False, 40.0),
            _first("t5x", False, 10.6),
        ],
        "trained": {
            "transformers-t5, tied": _trained(6.0),
            "transformers-t5, untied": _trained(9.0),
            "transformers-t5-4.19, untied": _trained(6.5),
            "t5x, untied": _trained(7.0),
        },
    },
    "gpt2-head": {
        "names": {
            "shape_of_head": [50, 4],
            "shape_of_table": [50, 4],
            "listed": False,
            "listed_with_duplicates": True,
            "in_state_dict": True,
            "is_the_table": True,
        },
        "tuning": [
            {"tied": _moved(0.2, 0.3, value), "untied": _moved(0.0, 0.0, value / 10)} for value in (0.49, 0.5, 0.51)
        ],
        "few_tokens": 400,
    },
    "nearest": {
        "tied": _searches(0.7, 0.3, 0.2),
        "untied": _searches(0.6, 0.3, 0.2),
        "rows": {"MiniLM": {"itself": _search(1.0, 0.99, 1.0), "others": _search(0.8, 0.0, 0.0), "queries": 50}},
        "vocab_size": 100,
    },
    "bert-head": {"seeds": [_bert(0.3, loss, again) for loss, again in ((3.9, 6.0), (3.91, 6.1), (3.89, 6.2))]},
    "padding-row": {
        "policies": {
            "none": [_padding(0.5, 1e-5, loss) for loss in _near(6.0)],
            "zeroed": [_padding(0.0, 1e-3, loss) for loss in _near(6.0)],
            "masked": [_padding(0.0, 0.0, loss) for loss in _near(6.0)],
            "untied": [_padding(0.0, 1e-5, loss) for loss in _near(6.0)],
        },
        "formula": {"norm": 1.0, "error": 1e-7},
    },
    "identity": {
        "steps": [0, 10],
        "vocab_size": 100,
        "hidden_size": 10,
        "bound": 0.9487,
        "tables": {"tied": _table(0.1, 0.5), "untied, input": _table(0.1, 0.2), "untied, output": _table(0.1, 0.6)},
        "trained": {"MiniLM": {"identity_distance": 0.9968}},
    },
    "tied-untied": {
        "steps": [0, 10],
        "tokens": 512,
        "few_tokens": 4000,
        "plenty": {
            "tied": _arm(600_000, 96, 3.2),
            "untied": _arm(1_000_000, 96, 3.0),
            "narrow": _arm(610_000, 64, 3.5),
        },
        "short": {"tied": _arm(600_000, 96, 3.0), "untied": _arm(1_000_000, 96, 3.2)},
        "alike": [[0.0, 0.4]] * 3,
    },
    "gradient": {
        "steps": [0, 10],
        "tied": [[_split(5.0, 0.02), _split(2.0, -0.05)]] * 2,
        "untied": [[_split(5.0, 0.02), _split(2.0, -0.05)]] * 2,
    },
}


def changed(name: str, **values: Any) -> dict[str, Any]:
    """The made-up numbers of a question with some of its keys replaced."""
    return {**copy.deepcopy(NUMBERS[name]), **values}
