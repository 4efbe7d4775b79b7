"""`embed_scale` and `logit_scale`: multipliers that belong to how a model is drawn, and that its config keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bowline.errors import ConfigError
from bowline.models import (
    GPT2Config,
    load,
)
from tests.models.sizes import CLASSES, configs

CONFIGS = configs(11, 8, 1)
IDS = torch.tensor([[2, 5, 7, 3]])


def run(model: Any, **inputs: Any) -> Any:
    return model(IDS, labels=IDS, **inputs)


@pytest.mark.parametrize("family", CLASSES)
def test_a_scaled_lookup_is_a_lookup_in_a_scaled_table(family: str) -> None:
    cls, config = CLASSES[family], CONFIGS[family]
    torch.manual_seed(0)
    plain = cls(config.updated(tie_word_embeddings=False)).eval()
    scaled = cls(config.updated(tie_word_embeddings=False, embed_scale=3.0)).eval()
    scaled.load_state_dict(plain.state_dict())
    with torch.no_grad():
        plain.get_input_embeddings().weight.mul_(3.0)
    torch.testing.assert_close(run(scaled).logits, run(plain).logits)


@pytest.mark.parametrize("family", CLASSES)
def test_a_logit_scale_multiplies_the_logits_and_the_loss_is_of_those(family: str) -> None:
    cls, config = CLASSES[family], CONFIGS[family]
    torch.manual_seed(0)
    plain = cls(config).eval()
    scaled = cls(config.updated(logit_scale=0.25)).eval()
    scaled.load_state_dict(plain.state_dict())
    torch.testing.assert_close(run(scaled).logits, run(plain).logits * 0.25)
    labels = IDS if family in ("bert", "t5") else IDS[:, 1:]
    logits = run(scaled).logits[:, : labels.shape[1]]
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    torch.testing.assert_close(run(scaled).loss, expected)


@pytest.mark.parametrize("family", CLASSES)
def test_the_file_keeps_them_and_states_them_only_where_they_do_something(family: str, tmp_path: Path) -> None:
    cls, config = CLASSES[family], CONFIGS[family]
    cls(config.updated(embed_scale=2.5, logit_scale=0.5)).save_pretrained(tmp_path)
    again = load(tmp_path)
    assert (again.config.embed_scale, again.config.logit_scale) == (2.5, 0.5)
    assert not {"embed_scale", "logit_scale"} & set(config.to_dict())


@pytest.mark.parametrize("value", ["2", -1.0, float("nan"), None, True])
def test_a_scale_that_is_no_number_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"config\.embed_scale is .*, expected a number from 0"):
        GPT2Config(embed_scale=value)
