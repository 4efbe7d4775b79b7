"""Recipes against initialisers that are not installed with the tests: they run where Keras or transformers 4 is."""

from __future__ import annotations

import json
import math
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bowline.recipes import RECIPES, Architecture, Distribution, Role, truncated, uniform
from bowline.recipes.catalogue import GLOROT

SHAPE = (1000, 600)
SIZES = {"fan_in": 1000.0, "fan_out": 600.0, "fan_avg": 800.0}
PEER = Path(__file__).parents[2] / ".peers" / "transformers-4.57.1" / "bin" / "python"


def agree(seen: float, expected: float, count: int) -> bool:
    """Two standard deviations, the one of `count` draws: within five standard errors."""
    return abs(seen / expected - 1) < 5 / math.sqrt(2 * count)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Keras's own
@pytest.mark.parametrize(
    ("initializer", "how"),
    [
        ({"class_name": "TruncatedNormal", "config": {"stddev": 0.02}}, truncated(0.02)),
        ({"class_name": "GlorotUniform", "config": {}}, GLOROT),
        (
            {"class_name": "VarianceScaling", "config": {"scale": 1.0, "mode": "fan_in", "distribution": "uniform"}},
            uniform(3**0.5, fan_in=-0.5),
        ),
        (
            {
                "class_name": "VarianceScaling",
                "config": {"scale": 1.0, "mode": "fan_in", "distribution": "truncated_normal"},
            },
            truncated(fan_in=-0.5, corrected=True),
        ),
    ],
)
def test_what_tensorflows_initialisers_draw(
    initializer: dict[str, Any], how: Distribution, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KERAS_BACKEND", os.environ.get("KERAS_BACKEND", "torch"))
    keras = pytest.importorskip("keras")
    drawn = keras.initializers.get({**initializer, "config": {**initializer["config"], "seed": 1}})(SHAPE)
    values = np.asarray(keras.ops.convert_to_numpy(drawn), dtype=np.float64)
    assert agree(values.std(), how.std(SIZES), values.size)
    bound = how.scale(SIZES) * (how.cut if how.kind == "truncated" else 1.0)
    assert 0.99 * bound < np.quantile(np.abs(values), 0.9999) <= bound  # its torch backend lets a few through


SCRIPT = """
import json, sys, torch, transformers
torch.manual_seed(0)
name, config = json.loads(sys.argv[1])
cls = getattr(transformers, name)
model = cls(cls.config_class(**config))
stds = {key: [float(value.double().std()), value.numel()] for key, value in model.state_dict().items()}
print("\\n" + json.dumps({"stds": stds, "tied": model.lm_head.weight is model.get_input_embeddings().weight}))
"""
T5 = {"vocab_size": 3000, "d_model": 128, "d_kv": 32, "d_ff": 512, "num_layers": 1, "num_heads": 4}
BLOCK = "encoder.block.0.layer"
ROLES = {
    "shared.weight": Role.INPUT_EMBEDDING,
    "lm_head.weight": Role.HEAD,
    f"{BLOCK}.0.SelfAttention.q.weight": Role.QUERY,
    f"{BLOCK}.0.SelfAttention.k.weight": Role.KEY,
    f"{BLOCK}.0.SelfAttention.o.weight": Role.ATTENTION_OUT,
    f"{BLOCK}.0.SelfAttention.relative_attention_bias.weight": Role.RELATIVE_BIAS,
    f"{BLOCK}.1.DenseReluDense.wi.weight": Role.FEED_FORWARD_IN,
    f"{BLOCK}.1.DenseReluDense.wo.weight": Role.FEED_FORWARD_OUT,
}


@pytest.mark.skipif(not PEER.exists(), reason="transformers 4 is not there: make sweep-4 installs it")
@pytest.mark.parametrize("tied", [True, False])
def test_what_transformers_4_draws_for_a_t5_whose_head_it_really_unties(tied: bool) -> None:
    config = {**T5, "tie_word_embeddings": tied}
    command = [str(PEER), "-c", SCRIPT, json.dumps(["T5ForConditionalGeneration", config])]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env={**os.environ, "HF_HUB_OFFLINE": "1"}
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["tied"] is tied
    recipe, sizes = RECIPES["transformers-t5"], Architecture.of({"model_type": "t5", **config}).sizes
    for name, role in ROLES.items():
        role = Role.INPUT_EMBEDDING if tied and role is Role.HEAD else role
        std, count = found["stds"][name]
        assert agree(std, recipe.of(role).std(sizes), count), name
