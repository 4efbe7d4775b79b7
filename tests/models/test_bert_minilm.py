"""A trained BERT, all-MiniLM-L6-v2: the sentence embeddings that transformers gives."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import Tokenizer

from bowline.models.bert import BertModel

pytestmark = pytest.mark.usefixtures("quiet_transformers")

TEXTS = [
    "A bowline is a knot that does not slip.",
    "The rope is tied back onto itself.",
    "Interest rates rose by a quarter of a percent, to the surprise of nobody who had read the minutes of the bank.",
    "Yes",
]


def embeddings(model: torch.nn.Module, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The mean over tokens, of length one."""
    with torch.no_grad():
        states = model(ids, attention_mask=mask).last_hidden_state
    mean = (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
    return torch.nn.functional.normalize(mean, dim=-1)


def test_sentence_embeddings_are_those_of_transformers(minilm: Path) -> None:
    tokenizer = Tokenizer.from_file(str(minilm / "tokenizer.json"))
    tokenizer.enable_padding()
    batch = tokenizer.encode_batch(TEXTS)
    ids = torch.tensor([one.ids for one in batch])
    mask = torch.tensor([one.attention_mask for one in batch])
    assert not mask.all()
    ours, info = BertModel.from_pretrained(minilm, output_loading_info=True)
    assert not info.missing_keys
    assert not info.mismatched_keys
    theirs = transformers.BertModel.from_pretrained(minilm, dtype=torch.float32).eval()
    mine, other = embeddings(ours, ids, mask), embeddings(theirs, ids, mask)
    assert (mine - other).abs().max() < 1e-5
    near = mine @ mine.T
    assert near[0, 1] > near[0, 2]  # the two of knots are the nearer
