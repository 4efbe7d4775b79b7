"""Two real tokenizers, pruned for the standard library's sources, as transformers loads them afterwards."""

from __future__ import annotations

import shutil
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from bowline.checkpoint.places.local_directory import LocalDirectory
from bowline.edit.tokenizer import (
    TokenSelection,
    check_split,
    count_tokens,
    read_tokenizer,
    rewritten_files,
    select_tokens,
)

SOURCES = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:20]
OTHER = ["日本語 und Ümläute 🎉", "  x = [1,\n\t2]\n", "The bowline is a knot that does not slip."]


def test_minilms_wordpiece_is_pruned_exactly(minilm: Path, tmp_path: Path, quiet_transformers: None) -> None:
    selection = prune(minilm, tmp_path)
    assert 4000 < len(selection.kept) < 8000
    lines = (tmp_path / "vocab.txt").read_text(encoding="utf-8").splitlines()
    assert len(lines) == len(selection.kept)
    compare_in_transformers(minilm, tmp_path, selection)


@pytest.mark.real
def test_smollm2s_byte_level_bpe_is_pruned_exactly(smollm2: Path, tmp_path: Path, quiet_transformers: None) -> None:
    selection = prune(smollm2, tmp_path)
    assert 5000 < len(selection.kept) < 12000
    compare_in_transformers(smollm2, tmp_path, selection)


def prune(place: Path, to: Path) -> TokenSelection:
    with LocalDirectory(place) as files:
        tokenizer = read_tokenizer(files)
        selection = select_tokens(tokenizer, corpus=count_tokens(tokenizer, SOURCES))
        written = rewritten_files(files, tokenizer, selection)
        pruned = written.files["tokenizer.json"]
        assert pruned is not None
        check = check_split(tokenizer, pruned, selection, SOURCES)
        assert check.difference is None
        assert check.documents == len(SOURCES)
        for name in files.sizes():
            if name.endswith((".json", ".txt", ".jinja")) and "/" not in name:
                shutil.copy(place / name, to / name)
    for name, data in written.files.items():
        if data is not None:
            (to / name).write_bytes(data)
    return selection


def compare_in_transformers(place: Path, pruned: Path, selection: TokenSelection) -> None:
    from transformers import AutoTokenizer

    before: Any = AutoTokenizer.from_pretrained(place)
    after: Any = AutoTokenizer.from_pretrained(pruned)
    assert len(after) == len(selection.kept)
    text = SOURCES[0].read_text(encoding="utf-8")[:2000]
    assert after(text).input_ids == [selection.new_id(old) for old in before(text).input_ids]
    for role, old in before.special_tokens_map.items():
        assert after.special_tokens_map[role] == old
        assert after.convert_tokens_to_ids(old) == selection.new_id(before.convert_tokens_to_ids(old))
    for other in OTHER:
        assert after.decode(after(other).input_ids) == before.decode(before(other).input_ids)
