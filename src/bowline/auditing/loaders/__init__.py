"""Predicts what each loader does with each tie, by the loader's own rules and without loading; one file per loader."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from bowline.auditing.loaders.llama_cpp import llama_cpp
from bowline.auditing.loaders.mlx_lm import mlx_lm
from bowline.auditing.loaders.outcome import Fate, Outcome, Result, StoredFacts, odd_flag
from bowline.auditing.loaders.transformers import transformers_4, transformers_5
from bowline.auditing.loaders.vllm import vllm, vllm_0_28
from bowline.families.declaration import Declaration
from bowline.families.loader_tables import loader_table
from bowline.families.transformers_table import load_table

__all__ = ["LOADERS", "Fate", "Outcome", "StoredFacts", "loaders_run", "odd_flag", "predict"]

LOADERS: Mapping[str, Callable[[Declaration, StoredFacts], Result]] = {
    "transformers-4": transformers_4,
    "transformers-5": transformers_5,
    "vllm-0.28": vllm_0_28,
    "vllm": vllm,
    "llama.cpp": llama_cpp,
    "mlx-lm": mlx_lm,
}


def loaders_run() -> dict[str, str]:
    """By loader: its name and the version that was run to check the predictions.

    Example:
        >>> loaders_run()["vllm-0.28"]
        'vLLM 0.28.0'
    """
    versions, vllm_table = load_table().versions, loader_table("vllm")
    return {
        "transformers-4": f"transformers {versions['transformers-4']}",
        "transformers-5": f"transformers {versions['transformers-5']}",
        "vllm-0.28": vllm_table["run_before"],
        "vllm": vllm_table["run"],
        "llama.cpp": loader_table("llama_cpp")["run"],
        "mlx-lm": loader_table("mlx_lm")["as_of"],
    }


def predict(declaration: Declaration, seen: StoredFacts) -> dict[str, dict[str, Outcome | None]]:
    """The outcome by loader and by target; `None` if it depends on values that were not read, or the class is unknown.

    Whatever loads an unknown class runs code that Bowline has not seen.
    """
    if declaration.inferred and not declaration.loaders:
        return {loader: dict.fromkeys(one.tie.target for one in declaration.ties) for loader in LOADERS}
    return {loader: dict(rule(declaration, seen)) for loader, rule in LOADERS.items()}
