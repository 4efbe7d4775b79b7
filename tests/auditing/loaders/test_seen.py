"""The predictions for loaders that are not installed here, held against what those loaders did.

Each file of `seen/` records one loader, run by `python -m tools.loader_sweep LOADER PYTHON CLASS... --record FILE`.
The same checkpoints are written again, much smaller: no fate depends on a size.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.23")

from tools.loader_sweep.cases import write_cases  # noqa: E402
from tools.loader_sweep.states import OTHER_ROWS  # noqa: E402
from tools.tiny import Sizes  # noqa: E402

LOADERS = {"llama_cpp": "llama.cpp", "mlx_lm": "mlx-lm", "vllm": "vllm"}
SEEN: dict[str, Any] = {
    LOADERS[path.stem]: json.loads(path.read_text()) for path in sorted(Path(__file__).parent.glob("seen/*.json"))
}
SIZES = Sizes(vocabulary=2 * OTHER_ROWS)


@pytest.mark.parametrize("name", sorted({name for record in SEEN.values() for name in record["fates"]}))
def test_predictions_are_what_each_loader_did(name: str, tmp_path: Path) -> None:
    wrong, held = [], 0
    for case in write_cases(name, tmp_path, SIZES):
        for loader, record in SEEN.items():
            if actual := record["fates"].get(name, {}).get(case.state):
                predicted = "refused" if case.others_refused.get(loader) else case.predicted.get(loader)
                held += 1
                if predicted != actual:
                    wrong.append(f"{loader}, {case.state}: predicted {predicted}, was {actual}")
    assert not wrong
    assert held == sum(len(record["fates"].get(name, {})) for record in SEEN.values())


def test_each_record_says_what_was_run() -> None:
    assert "mlx-lm" in SEEN
    for loader, record in SEEN.items():
        assert record["version"].lower().startswith(loader)
        assert len(record["fates"]) >= 8
