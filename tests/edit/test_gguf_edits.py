"""Edits of GGUF files: the rows that stay are the stored bytes, in every type of ggml; undo, refusals, hostile files.

The model of a result is the file that a plain writer makes of the tokens that stay: the two are equal byte for byte.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from bowline.auditing import audit
from bowline.cli import app
from bowline.edit import CheckpointEdit, EditReport, history, open_checkpoint, undo
from bowline.edit.gguf import gguf_draft
from bowline.errors import BowlineError, CheckpointError, FormatError, TieError, UsageError
from tests.checkpoint.gguf_files import EMBEDDING, HEAD, KINDS, Stored, Typed, gguf_file

PEERS = Path(__file__).parents[2] / ".peers"
TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL")
WIDTH = 256
SPECIAL = ["<unk>", "<s>", "</s>"]
TOKENS = [*SPECIAL, *"abcdef", *(f"t{number}" for number in range(20)), "ab", "abc", "de", "ef", "[PAD33]", "[PAD34]"]
KINDS_OF_TOKENS = [2, 3, 3, *[1] * (len(TOKENS) - 5), 5, 5]
MERGES = ["a b", "ab c", "d e", "e f"]
VOCABULARY: Mapping[str, Any] = {
    "general.architecture": "llama",
    "general.alignment": 32,
    "llama.vocab_size": len(TOKENS),
    "llama.rope.freq_base": 10000.0,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": KINDS_OF_TOKENS,
    "tokenizer.ggml.merges": MERGES,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.padding_token_id": TOKENS.index("t7"),
    "tokenizer.ggml.add_bos_token": False,
    "tokenizer.chat_template": "{{ bos_token }}{{ messages }}",
    "general.quantization_version": 2,
}
Steps = Callable[[CheckpointEdit], CheckpointEdit]


def stored(dtype: str, *shape: int, seed: int = 0) -> Stored:
    """A tensor of random bytes: what stays must be these, whatever they mean."""
    kind = KINDS[dtype]
    nbytes = int(np.prod(shape)) // kind.elements * kind.nbytes
    return Stored(dtype, shape, np.random.default_rng(seed).bytes(nbytes))


def tensors(dtype: str = "Q8_0", rows: int = len(TOKENS), **more: Stored) -> dict[str, Stored]:
    """An embedding, a matrix and a vector; `more` are further tensors, `__` for a dot."""
    return {
        EMBEDDING: stored(dtype, rows, WIDTH),
        **{name.replace("__", "."): tensor for name, tensor in more.items()},
        "blk.0.ffn_up.weight": stored("Q4_K", 48, WIDTH, seed=1),
        "output_norm.weight": stored("F32", 7, seed=2),
    }


def write(place: Path, held: Mapping[str, Stored], values: Mapping[str, Any] = VOCABULARY, **layout: Any) -> Path:
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(gguf_file(held, values, **layout))
    return place


def rows_of(tensor: Stored, kept: Iterable[int]) -> Stored:
    """The rows, as bytes."""
    step = len(tensor.raw) // tensor.shape[0]
    kept = list(kept)
    raw = b"".join(tensor.raw[row * step : (row + 1) * step] for row in kept)
    return Stored(tensor.dtype, (len(kept), *tensor.shape[1:]), raw)


def cut(held: Mapping[str, Stored], kept: list[int], tables: Iterable[str] = (EMBEDDING,)) -> dict[str, Stored]:
    return {name: rows_of(tensor, kept) if name in tables else tensor for name, tensor in held.items()}


def cut_values(kept: list[int], values: Mapping[str, Any] = VOCABULARY) -> dict[str, Any]:
    """The keys for the tokens that stay, by the plainest code."""
    tokens = [values["tokenizer.ggml.tokens"][old] for old in kept]
    merges = [pair for pair in values["tokenizer.ggml.merges"] if pair.replace(" ", "") in tokens]
    changed: dict[str, Any] = {
        "llama.vocab_size": len(kept),
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [values["tokenizer.ggml.token_type"][old] for old in kept],
        "tokenizer.ggml.merges": merges or Typed(9, struct.pack("<IQ", 8, 0)),
    }
    ids = {key: kept.index(value) for key, value in values.items() if key.endswith("_token_id")}
    return {key: {**changed, **ids}.get(key, value) for key, value in values.items()}


def needed(listed: Iterable[str]) -> list[int]:
    """The ids that stay if these tokens are listed: with the special ones, the letters, and what they are merged of."""
    parts = {"abc": ["ab"]}
    wanted = {*SPECIAL, *"abcdef", "t7", *listed}
    wanted |= {part for token in wanted for part in parts.get(token, ())}
    return sorted(TOKENS.index(token) for token in wanted)


def keep_list(tmp_path: Path, tokens: Iterable[str]) -> Path:
    place = tmp_path / "keep.txt"
    place.write_text("".join(f"{json.dumps(token)}\n" for token in tokens))
    return place


def run(place: Path, steps: Steps, destination: Path | None = None) -> EditReport:
    with open_checkpoint(place) as checkpoint:
        return steps(checkpoint.edit()).commit(destination, in_place=destination is None)


def files_of(place: Path) -> dict[str, bytes]:
    return {str(path.relative_to(place)): path.read_bytes() for path in sorted(place.rglob("*")) if path.is_file()}


# --- prune ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", TYPES)
def test_the_rows_that_stay_are_the_stored_bytes(tmp_path: Path, dtype: str) -> None:
    held = tensors(dtype)
    source = write(tmp_path / "model.gguf", held)
    kept = needed(["abc", "t3", "t19"])
    keep = keep_list(tmp_path, ["abc", "t3", "t19"])
    report = run(source, lambda edit: edit.prune(keep_tokens=keep), tmp_path / "small.gguf")
    assert (tmp_path / "small.gguf").read_bytes() == gguf_file(cut(held, kept), cut_values(kept))
    assert json.loads((tmp_path / "small.token_map.json").read_text()) == {
        str(old): new for new, old in enumerate(kept)
    }
    assert source.read_bytes() == gguf_file(held, VOCABULARY)
    assert report.clean
    assert report.place == tmp_path / "small.gguf"


@pytest.mark.parametrize("dtype", TYPES)
def test_the_package_gguf_reads_the_rows_that_stay(tmp_path: Path, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not (PEERS / "gguf").exists():
        pytest.skip("the package gguf is not here: run `make real`")
    monkeypatch.syspath_prepend(str(PEERS / "gguf"))
    gguf = pytest.importorskip("gguf")
    held = tensors(dtype, output__weight=stored(dtype, len(TOKENS), WIDTH, seed=3))
    keep = keep_list(tmp_path, ["t3"])
    run(write(tmp_path / "model.gguf", held), lambda edit: edit.prune(keep_tokens=keep), tmp_path / "small.gguf")
    read = gguf.GGUFReader(tmp_path / "small.gguf")
    kept = needed(["t3"])
    assert read.fields["tokenizer.ggml.tokens"].contents() == [TOKENS[old] for old in kept]
    for tensor in read.tensors:
        expected = cut(held, kept, (EMBEDDING, HEAD))[tensor.name]
        assert tuple(reversed(tensor.shape.tolist())) == expected.shape
        assert tensor.data.tobytes() == expected.raw


@settings(max_examples=60, deadline=None)
@given(
    listed=st.sets(st.sampled_from([token for token in TOKENS if token not in SPECIAL]), min_size=1),
    dtypes=st.tuples(st.sampled_from(TYPES), st.sampled_from(TYPES)),
    alignment=st.sampled_from([8, 32, 256]),
    version=st.sampled_from([2, 3]),
    seed=st.integers(0, 9),
)
def test_any_set_of_tokens_gives_the_file_that_a_plain_writer_makes(
    tmp_path_factory: pytest.TempPathFactory,
    listed: set[str],
    dtypes: tuple[str, str],
    alignment: int,
    version: int,
    seed: int,
) -> None:
    place = tmp_path_factory.mktemp("drawn")
    values = {**VOCABULARY, "general.alignment": alignment}
    held = tensors(
        dtypes[0],
        output__weight=stored(dtypes[1], len(TOKENS), WIDTH, seed=seed),
        output__bias=stored("F32", len(TOKENS), seed=seed + 10),
        per_layer_token_embd__weight=stored("Q8_0", len(TOKENS), 64, seed=seed + 20),
    )
    source = write(place / "model.gguf", held, values, alignment=alignment, version=version)
    keep = keep_list(place, listed)
    run(source, lambda edit: edit.prune(keep_tokens=keep), place / "small.gguf")
    kept = needed(listed)
    tables = (EMBEDDING, HEAD, "output.bias", "per_layer_token_embd.weight")
    expected = gguf_file(cut(held, kept, tables), cut_values(kept, values), alignment=alignment, version=version)
    assert (place / "small.gguf").read_bytes() == expected


def test_rows_are_copied_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a few rows give the same file as one."""
    from bowline.edit.gguf import stored_rows

    held = tensors("Q4_0")
    keep = keep_list(tmp_path, ["t1", "t2", "t18"])
    source = write(tmp_path / "model.gguf", held)
    monkeypatch.setattr(stored_rows, "BLOCK_BYTES", 700)
    monkeypatch.setattr(gguf_draft, "BLOCK_BYTES", 50)
    run(source, lambda edit: edit.prune(keep_tokens=keep), tmp_path / "small.gguf")
    kept = needed(["t1", "t2", "t18"])
    assert (tmp_path / "small.gguf").read_bytes() == gguf_file(cut(held, kept), cut_values(kept))


def test_a_pattern_keeps_the_tokens_in_whose_text_it_is_found(tmp_path: Path) -> None:
    held = tensors()
    run(write(tmp_path / "model.gguf", held), lambda edit: edit.prune(pattern="^t1"), tmp_path / "small.gguf")
    kept = needed([token for token in TOKENS if token.startswith("t1")])
    assert (tmp_path / "small.gguf").read_bytes() == gguf_file(cut(held, kept), cut_values(kept))


def test_every_key_that_names_tokens_follows_in_its_own_type(tmp_path: Path) -> None:
    t = TOKENS.index
    further = {
        "llama.decoder_start_token_id": Typed(10, struct.pack("<Q", t("t3"))),
        "tokenizer.ggml.eot_token_id": Typed(5, struct.pack("<i", -1)),
        "tokenizer.ggml.mask_token_id": 4_000_000,
        "tokenizer.ggml.suppress_tokens": [t("t9"), t("t2")],
        "tokenizer.ggml.some_token_ids": Typed(9, struct.pack("<IQII", 4, 2, t("t9"), 1)),
    }
    source = write(tmp_path / "model.gguf", tensors(), {**VOCABULARY, **further})
    keep = keep_list(tmp_path, ["ab"])
    run(source, lambda edit: edit.prune(keep_tokens=keep), tmp_path / "small.gguf")
    kept = needed(["ab", "t3", "t9", "t2"])
    new = {token: at for at, token in enumerate(TOKENS[old] for old in kept)}
    expected = {
        "llama.decoder_start_token_id": Typed(10, struct.pack("<Q", new["t3"])),
        "tokenizer.ggml.eot_token_id": further["tokenizer.ggml.eot_token_id"],
        "tokenizer.ggml.mask_token_id": 4_000_000,
        "tokenizer.ggml.suppress_tokens": [new["t9"], new["t2"]],
        "tokenizer.ggml.some_token_ids": Typed(9, struct.pack("<IQII", 4, 2, new["t9"], 1)),
    }
    held = cut(tensors(), kept)
    assert (tmp_path / "small.gguf").read_bytes() == gguf_file(held, {**cut_values(kept), **expected})


def test_an_id_that_llama_cpp_assumes_stays_where_it_is(tmp_path: Path) -> None:
    """Without `eos_token_id`, llama.cpp takes token 11 of a byte-level vocabulary, so the first twelve stay."""
    values = {key: value for key, value in VOCABULARY.items() if key != "tokenizer.ggml.eos_token_id"}
    source = write(tmp_path / "model.gguf", tensors(), values)
    keep = keep_list(tmp_path, ["de"])
    run(source, lambda edit: edit.prune(keep_tokens=keep), tmp_path / "small.gguf")
    kept = sorted({*range(12), *needed(["de"])})
    assert (tmp_path / "small.gguf").read_bytes() == gguf_file(cut(tensors(), kept), cut_values(kept, values))


def test_a_token_that_llama_cpp_finds_by_its_text_stays(tmp_path: Path) -> None:
    tokens = ["<|im_end|>" if token == "t5" else token for token in TOKENS]
    values = {**VOCABULARY, "tokenizer.ggml.tokens": tokens}
    source = write(tmp_path / "model.gguf", tensors(), values)
    keep = keep_list(tmp_path, ["de"])
    run(source, lambda edit: edit.prune(keep_tokens=keep), tmp_path / "small.gguf")
    kept = needed(["de", "t5"])
    assert (tmp_path / "small.gguf").read_bytes() == gguf_file(cut(tensors(), kept), cut_values(kept, values))


# --- merges by score: the model `llama` -------------------------------------------------------------------------------

PIECES = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = ["ab", "abc", "bc", "cd", "bcd", "abcd", "da", "\u2581a", "\u2581ab", "dd", "ddd"]
SPM = [*SPECIAL, *PIECES, "\u2581", *"abcd", *WORDS]
SPM_KINDS = [2, 3, 3, *[6] * 256, *[1] * (len(SPM) - 259)]


def split_by_score(tokens: list[str], scores: list[float], line: str) -> list[str]:
    """llama.cpp's split of a text into tokens, by the plainest code: the best pair first, the leftmost of equals."""
    symbols = list(line)
    while True:
        pairs = [
            (-scores[tokens.index(symbols[at] + symbols[at + 1])], at)
            for at in range(len(symbols) - 1)
            if symbols[at] + symbols[at + 1] in tokens
        ]
        if not pairs:
            break
        _, at = min(pairs)
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    return [
        part
        for symbol in symbols
        for part in ([symbol] if symbol in tokens else [f"<0x{byte:02X}>" for byte in symbol.encode()])
    ]


@settings(max_examples=40, deadline=None)
@given(
    line=st.text("abcd\u2581\u00e9", min_size=1, max_size=20),
    order=st.permutations(range(len(WORDS))),
)
def test_a_text_whose_tokens_stay_splits_as_before_where_tokens_merge_by_score(
    tmp_path_factory: pytest.TempPathFactory, line: str, order: list[int]
) -> None:
    place = tmp_path_factory.mktemp("drawn")
    scores = [*[0.0] * (len(SPM) - len(WORDS)), *(-float(rank) / 3 for rank in order)]
    raw = struct.pack(f"<IQ{len(scores)}f", 6, len(scores), *scores)
    values = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": SPM,
        "tokenizer.ggml.scores": Typed(9, raw),
        "tokenizer.ggml.token_type": SPM_KINDS,
    }
    source = write(place / "model.gguf", tensors(rows=len(SPM)), values)
    before = split_by_score(SPM, scores, line)
    keep = keep_list(place, before)
    run(source, lambda edit: edit.prune(keep_tokens=keep), place / "small.gguf")
    with open_checkpoint(place / "small.gguf") as checkpoint:
        found = checkpoint.token_ids()
        assert found is not None
        assert split_by_score(found.texts, [scores[SPM.index(token)] for token in found.texts], line) == before
        assert found.texts[:260] == SPM[:260]
    made = {str(old): new for new, old in enumerate(sorted(SPM.index(token) for token in found.texts))}
    assert json.loads((place / "small.token_map.json").read_text()) == made
    kept = [int(old) for old in made]
    changed = struct.pack(f"<IQ{len(kept)}f", 6, len(kept), *(scores[old] for old in kept))
    expected = {
        **values,
        "tokenizer.ggml.tokens": [SPM[old] for old in kept],
        "tokenizer.ggml.scores": Typed(9, changed),
        "tokenizer.ggml.token_type": [SPM_KINDS[old] for old in kept],
    }
    assert (place / "small.gguf").read_bytes() == gguf_file(cut(tensors(rows=len(SPM)), kept), expected)


# --- a corpus ---------------------------------------------------------------------------------------------------------


def tokenizer_json(tokens: list[str], merges: list[str], size: int | None = None) -> str:
    added = [
        {"id": at, "content": token, "special": True, "single_word": False, "lstrip": False, "rstrip": False}
        | {"normalized": False}
        for at, token in enumerate(SPECIAL)
    ]
    vocabulary = {token: at for at, token in enumerate(tokens[:size])}
    model = {"type": "BPE", "vocab": vocabulary, "merges": [merge.split(" ") for merge in merges]}
    step = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return json.dumps({"version": "1.0", "added_tokens": added, "pre_tokenizer": step, "decoder": step, "model": model})


@pytest.fixture
def with_tokenizer(tmp_path: Path) -> Path:
    """A directory of a GGUF file and its tokenizer.json, which has no padding tokens."""
    write(tmp_path / "model" / "model.gguf", tensors())
    (tmp_path / "model" / "tokenizer.json").write_text(tokenizer_json(TOKENS, MERGES, len(TOKENS) - 2))
    (tmp_path / "model" / "README.md").write_text("a model")
    (tmp_path / "corpus.txt").write_text("abc abd\nabcabc")
    return tmp_path / "model"


def test_a_corpus_is_counted_with_the_tokenizer_json_beside_the_file(with_tokenizer: Path, tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.txt"
    before = files_of(with_tokenizer)
    report = run(with_tokenizer, lambda edit: edit.prune(corpus=[corpus]))
    kept = needed(["abc"])
    assert (with_tokenizer / "model.gguf").read_bytes() == gguf_file(cut(tensors(), kept), cut_values(kept))
    own = json.loads((with_tokenizer / "tokenizer.json").read_text())
    assert own["model"]["vocab"] == {TOKENS[old]: new for new, old in enumerate(kept)}
    assert own["model"]["merges"] == [["a", "b"], ["ab", "c"]]
    assert (with_tokenizer / "model.token_map.json").exists()
    assert "split 1 documents into the same" in report.checked[0]
    (change,) = history(with_tokenizer)
    assert change.why.startswith("prune --corpus")
    undo(with_tokenizer)
    assert files_of(with_tokenizer) == before


@pytest.mark.parametrize("change", ["token", "merge", "missing", "by score"])
def test_a_corpus_is_refused_without_the_same_tokenizer_beside(
    with_tokenizer: Path, tmp_path: Path, change: str
) -> None:
    other = ["tX" if token == "t4" else token for token in TOKENS[:-2]]
    if change == "token":
        (with_tokenizer / "tokenizer.json").write_text(tokenizer_json(other, MERGES))
    elif change == "merge":
        (with_tokenizer / "tokenizer.json").write_text(tokenizer_json(TOKENS[:-2], MERGES[:-1]))
    elif change == "missing":
        (with_tokenizer / "tokenizer.json").unlink()
    else:
        write(with_tokenizer / "model.gguf", tensors(), {**VOCABULARY, "tokenizer.ggml.model": "llama"})
    said = {
        "token": "the tokenizer.json beside it is another tokenizer: it has 'tX' under the id 13, expected 't4'",
        "merge": "the tokenizer.json beside it is another tokenizer: its 3 merges differ from the 4 of the file",
        "missing": "there is no tokenizer.json beside",
        "by score": "the tokenizer merges by score (the model 'llama')",
    }
    with pytest.raises(UsageError, match=re.escape(said[change])) as raised:
        run(with_tokenizer, lambda edit: edit.prune(corpus=[tmp_path / "corpus.txt"]))
    assert "--keep-tokens" in (raised.value.help or "")


def test_files_beside_that_keep_the_old_ids_are_named(with_tokenizer: Path, tmp_path: Path) -> None:
    keep = keep_list(tmp_path, ["ab"])
    report = run(with_tokenizer, lambda edit: edit.prune(keep_tokens=keep))
    assert any(note.startswith("tokenizer.json beside the file") for note in report.plan.notes)


# --- tie --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", TYPES)
def test_tie_drops_a_head_of_the_same_bytes(tmp_path: Path, dtype: str) -> None:
    held = tensors(dtype, output__weight=stored(dtype, len(TOKENS), WIDTH))
    report = run(write(tmp_path / "model.gguf", held), lambda edit: edit.tie(), tmp_path / "tied.gguf")
    assert (tmp_path / "tied.gguf").read_bytes() == gguf_file(tensors(dtype), VOCABULARY)
    assert not (tmp_path / "tied.token_map.json").exists()
    assert report.clean
    assert audit(tmp_path / "tied.gguf").as_dict()["outcomes"]["llama.cpp"] == {HEAD: "tied"}


@pytest.mark.parametrize("dtype", ["Q8_0", "F16"])
@pytest.mark.parametrize("keep", ["embedding", "head"])
def test_keep_says_whose_bytes_serve_both_also_in_another_type(tmp_path: Path, dtype: str, keep: Any) -> None:
    head = stored(dtype, len(TOKENS), WIDTH, seed=5)
    held = tensors(output__weight=head)
    source = write(tmp_path / "model.gguf", held)
    said = "35 of 35 rows differ" if dtype == "Q8_0" else "are stored as F16 and Q8_0, expected one type"
    with pytest.raises(TieError, match=said):
        run(source, lambda edit: edit.tie(), tmp_path / "tied.gguf")
    run(source, lambda edit: edit.tie(keep=keep), tmp_path / "tied.gguf")
    kept = held[EMBEDDING] if keep == "embedding" else head
    assert (tmp_path / "tied.gguf").read_bytes() == gguf_file({**tensors(), EMBEDDING: kept}, VOCABULARY)


def test_a_tied_file_is_not_written_again(tmp_path: Path) -> None:
    source = write(tmp_path / "model.gguf", tensors())
    with open_checkpoint(source) as checkpoint:
        plan = checkpoint.edit().tie().plan()
    assert not plan.changes
    assert plan.notes == ("it is tied already: no output.weight is stored",)


@pytest.mark.parametrize(
    ("architecture", "said"),
    [
        ("phi2", "llama.cpp refuses a file of the architecture phi2 without output.weight"),
        ("bert", "a model of the architecture bert has no head"),
        ("unheard-of", "it is not known whether llama.cpp falls back for 'unheard-of'"),
    ],
)
def test_tie_is_refused_where_llama_cpp_does_not_fall_back(tmp_path: Path, architecture: str, said: str) -> None:
    held = tensors(output__weight=tensors()[EMBEDDING])
    source = write(tmp_path / "model.gguf", held, {**VOCABULARY, "general.architecture": architecture})
    with pytest.raises(TieError, match=re.escape(said)):
        run(source, lambda edit: edit.tie(), tmp_path / "tied.gguf")


def test_a_chain_is_one_edit(tmp_path: Path) -> None:
    held = tensors(output__weight=stored("F16", len(TOKENS), WIDTH, seed=5))
    keep = keep_list(tmp_path, ["t1"])
    source = write(tmp_path / "model.gguf", held)
    run(source, lambda edit: edit.prune(keep_tokens=keep).tie(keep="head").prune(pattern="[0-9]"), tmp_path / "a.gguf")
    kept = needed(["t1"])
    expected = {**tensors(), EMBEDDING: held[HEAD]}
    assert (tmp_path / "a.gguf").read_bytes() == gguf_file(cut(expected, kept), cut_values(kept))


# --- resize -----------------------------------------------------------------------------------------------------------


def test_resize_drops_the_padding_at_the_end(tmp_path: Path) -> None:
    size = len(TOKENS) - 2
    source = write(tmp_path / "model.gguf", tensors())
    run(source, lambda edit: edit.resize(size), tmp_path / "small.gguf")
    kept = list(range(size))
    assert (tmp_path / "small.gguf").read_bytes() == gguf_file(cut(tensors(), kept), cut_values(kept))


def test_resize_drops_any_row_of_a_file_without_tokens(tmp_path: Path) -> None:
    values = {"general.architecture": "llama", "llama.vocab_size": 40}
    source = write(tmp_path / "model.gguf", tensors("Q6_K", rows=40), values)
    run(source, lambda edit: edit.resize(30, pad_to_multiple_of=16), tmp_path / "small.gguf")
    expected = gguf_file(cut(tensors("Q6_K", rows=40), list(range(32))), {**values, "llama.vocab_size": 32})
    assert (tmp_path / "small.gguf").read_bytes() == expected


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"to": 64}, "64 rows were asked for, and the file has 35: new rows would have to be quantised"),
        ({"to": 32}, "to=32: token 32 is 'ef', which the tokenizer uses"),
        ({"to": 10}, "tokenizer.ggml.padding_token_id is token 16, which would be dropped"),
        ({"add_tokens": ["x"]}, "tokens cannot be added to a GGUF file"),
    ],
)
def test_resize_refuses_new_rows_and_used_tokens(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    source = write(tmp_path / "model.gguf", tensors())
    with pytest.raises(UsageError, match=re.escape(said)):
        run(source, lambda edit: edit.resize(**options), tmp_path / "small.gguf")
    assert not (tmp_path / "small.gguf").exists()


# --- places -----------------------------------------------------------------------------------------------------------


def test_in_place_the_other_files_of_the_directory_stay_and_undo_brings_back_the_bytes(tmp_path: Path) -> None:
    place = tmp_path / "models"
    source = write(place / "one.gguf", tensors())
    write(place / "two.gguf", tensors("F16"))
    (place / "README.md").write_text("two models")
    before = files_of(place)
    keep = keep_list(tmp_path, ["t1"])
    report = run(source, lambda edit: edit.prune(keep_tokens=keep))
    after = {name: data for name, data in files_of(place).items() if not name.startswith(".bowline")}
    assert set(after) == {*before, "one.token_map.json"}
    assert {name: after[name] for name in before if name != "one.gguf"} == {
        name: data for name, data in before.items() if name != "one.gguf"
    }
    assert after["one.gguf"] == gguf_file(cut(tensors(), needed(["t1"])), cut_values(needed(["t1"])))
    assert report.kept_in is not None
    undo(place)
    assert files_of(place) == before


@pytest.mark.parametrize("whole", [True, False], ids=["of a directory", "of a file"])
def test_a_new_directory_gets_the_neighbours_if_the_directory_was_given(
    with_tokenizer: Path, tmp_path: Path, whole: bool
) -> None:
    keep = keep_list(tmp_path, ["t1"])
    (with_tokenizer / "below").mkdir()
    source = with_tokenizer if whole else with_tokenizer / "model.gguf"
    run(source, lambda edit: edit.prune(keep_tokens=keep), tmp_path / "new")
    names = {path.name for path in (tmp_path / "new").iterdir()} - {".bowline"}
    others = {"tokenizer.json", "README.md", "below"} if whole else set()
    assert names == {"model.gguf", "model.token_map.json", *others}
    kept = needed(["t1"])
    assert (tmp_path / "new" / "model.gguf").read_bytes() == gguf_file(cut(tensors(), kept), cut_values(kept))


def test_a_file_that_exists_is_not_overwritten(tmp_path: Path) -> None:
    source = write(tmp_path / "model.gguf", tensors())
    keep = keep_list(tmp_path, ["t1"])
    for taken in ("small.gguf", "small.token_map.json"):
        (tmp_path / taken).write_text("mine")
        before = files_of(tmp_path)
        with pytest.raises(CheckpointError, match=f"{taken}: exists, expected a new file"):
            run(source, lambda edit: edit.prune(keep_tokens=keep), tmp_path / "small.gguf")
        assert files_of(tmp_path) == before
        (tmp_path / taken).unlink()


def test_what_a_stopped_process_left_is_removed(tmp_path: Path) -> None:
    source = write(tmp_path / "model.gguf", tensors())
    left = tmp_path / ".small.gguf.12345-0123abcd.partial"
    write(left / "small.gguf", tensors())
    keep = keep_list(tmp_path, ["t1"])
    report = run(source, lambda edit: edit.prune(keep_tokens=keep), tmp_path / "small.gguf")
    assert report.notes == (f"removed {left.name}, which a stopped process had left",)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"model.gguf", "keep.txt", "small.gguf", "small.token_map.json"}


def test_a_result_that_is_not_what_was_planned_is_thrown_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write(tmp_path / "model.gguf", tensors())
    before = files_of(tmp_path)
    keep = keep_list(tmp_path, ["t1"])
    zeros = lambda draft: (bytes(len(part)) for part in draft.parts())  # noqa: E731
    monkeypatch.setattr(gguf_draft.GGUFDraft, "sources", zeros)
    with pytest.raises(CheckpointError, match="nothing was changed"):
        run(source, lambda edit: edit.prune(keep_tokens=keep), tmp_path / "small.gguf")
    (tmp_path / "keep.txt").unlink()
    assert files_of(tmp_path) == before


def test_the_command_prunes_a_gguf_file(tmp_path: Path) -> None:
    source = write(tmp_path / "model.gguf", tensors())
    keep = keep_list(tmp_path, ["t1"])
    command = ["prune", str(source), str(tmp_path / "small.gguf"), "--keep-tokens", str(keep)]
    planned = CliRunner().invoke(app, [*command, "--dry-run"])
    assert planned.exit_code == 0
    assert "write model.gguf" in planned.output
    assert not (tmp_path / "small.gguf").exists()
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    assert "11 of 35 rows stay: 1 in the keep file, 3 special, 1 named in a config, 6 byte alphabet" in done.output
    assert CliRunner().invoke(app, ["audit", str(tmp_path / "small.gguf")]).exit_code == 0


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("held", "values", "said"),
    [
        ({"blk.0.odd.weight": stored("F32", 5, 35)}, {}, "blk.0.odd.weight [5, 35] may or may not have a row for each"),
        ({"blk.0.odd.weight": stored("F32", 35)}, {}, "blk.0.odd.weight [35] may or may not have a row for each"),
        ({HEAD: stored("Q8_0", 30, WIDTH)}, {}, "output.weight has 30 rows for 35 tokens, expected a row for each"),
        ({}, {"tokenizer.ggml.odd": list(range(35))}, "tokenizer.ggml.odd may or may not have an item for each"),
        ({}, {"tokenizer.ggml.token_type": [1] * 34}, "tokenizer.ggml.token_type has 34 items for 35 tokens"),
        ({}, {"tokenizer.ggml.token_type": "normal"}, "tokenizer.ggml.token_type is no array, expected an array of"),
        ({}, {"tokenizer.ggml.tokens": [*TOKENS[:-1], "t1"]}, "two tokens have the text 't1'"),
        ({}, {"tokenizer.ggml.merges": ["a b", "ab"]}, "tokenizer.ggml.merges[1]: 'ab', expected two tokens"),
        ({}, {"tokenizer.ggml.merges": ["a b", "a b"]}, "tokenizer.ggml.merges has a pair twice"),
        ({}, {"tokenizer.ggml.merges": ["a x"]}, "a merge takes or makes 'x', which is not a token"),
        ({}, {"tokenizer.ggml.model": "t5"}, "the tokenizer is of the model 't5'"),
        ({}, {"tokenizer.ggml.pre": "gemma4"}, "the tokenizer is of the model 'gpt2' with the pre-tokenizer 'gemma4'"),
        ({}, {"tokenizer.huggingface.json": "{}"}, "tokenizer.huggingface.json: holds a tokenizer with its ids"),
        ({}, {"llama.ple.ngram_size": 3}, "llama.ple.ngram_size: the model hashes token ids"),
        ({}, {"tokenizer.chat_template": "{{ x == eos_token_id }}"}, "tokenizer.chat_template: uses 'eos_token_id'"),
    ],
)
def test_what_may_or_may_not_belong_to_the_vocabulary_is_refused_by_name(
    tmp_path: Path, held: dict[str, Stored], values: dict[str, Any], said: str
) -> None:
    source = write(tmp_path / "model.gguf", {**tensors(), **held}, {**VOCABULARY, **values})
    keep = keep_list(tmp_path, ["t1"])
    with pytest.raises(BowlineError, match=re.escape(said)):
        run(source, lambda edit: edit.prune(keep_tokens=keep), tmp_path / "small.gguf")
    assert not (tmp_path / "small.gguf").exists()


@pytest.mark.parametrize(
    "steps", [lambda edit: edit.untie(), lambda edit: edit.cast("bf16"), lambda edit: edit.dedupe()]
)
def test_other_edits_are_refused(tmp_path: Path, steps: Steps) -> None:
    source = write(tmp_path / "model.gguf", tensors())
    with pytest.raises(UsageError, match="is a GGUF file, which can be tied, pruned and resized"):
        run(source, steps, tmp_path / "new.gguf")


def test_a_file_in_parts_is_refused(tmp_path: Path) -> None:
    held = tensors()
    for number, names in enumerate(([EMBEDDING], ["blk.0.ffn_up.weight", "output_norm.weight"])):
        keys = {"split.no": Typed(2, struct.pack("<H", number)), "split.count": Typed(2, struct.pack("<H", 2))}
        values = {**(VOCABULARY if number == 0 else {}), **keys}
        write(tmp_path / f"model-0000{number + 1}-of-00002.gguf", {name: held[name] for name in names}, values)
    with pytest.raises(UsageError, match="is split in 2 files, expected one GGUF file") as raised:
        run(tmp_path, lambda edit: edit.tie(), tmp_path / "new.gguf")
    assert raised.value.help == "merge them first: llama-gguf-split --merge"


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_damaged_file_is_refused_or_edited_and_never_a_crash(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    whole = bytearray(gguf_file(tensors(), VOCABULARY))
    header = len(whole) - sum(-(-len(tensor.raw) // 32) * 32 for tensor in tensors().values())
    place = tmp_path_factory.mktemp("damaged")
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(st.integers(0, header - 1))] = data.draw(st.integers(0, 255))
    (place / "model.gguf").write_bytes(bytes(whole[: data.draw(st.integers(header // 2, len(whole)))]))
    keep = keep_list(place, ["t1"])
    try:
        run(place / "model.gguf", lambda edit: edit.tie().prune(keep_tokens=keep), place / "small.gguf")
    except BowlineError:
        assert not (place / "small.gguf").exists()
    else:
        audit(place / "small.gguf")


def test_the_strict_reader_refuses_a_hostile_file(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(gguf_file(tensors(), {"a": Typed(99, bytes(8))}))
    with pytest.raises(FormatError, match="has the type 99"):
        run(tmp_path / "model.gguf", lambda edit: edit.tie(), tmp_path / "new.gguf")


# --- a real trained model ---------------------------------------------------------------------------------------------


def greedy(file: Path, prompt: Path, count: int) -> dict[str, list[Any]]:
    """The ids of a prompt in llama.cpp, and the ids and logits of the most likely tokens after it."""
    script = Path(__file__).parent / "llama_cpp_greedy.py"
    done = subprocess.run(
        [sys.executable, str(script), str(file), str(prompt), str(count)],
        env={**os.environ, "LLAMA_CPP": str(PEERS / "llama-cpp")},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    found: dict[str, list[Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.real
def test_smollm2_as_gguf_is_pruned_to_the_standard_library(
    smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = sorted((PEERS / "real" / "wheel").rglob("*.gguf"))
    if not files or not (PEERS / "gguf").exists():
        pytest.skip("SmolLM2-135M-Instruct as GGUF, or the package gguf, is not here: run `make real`")
    monkeypatch.syspath_prepend(str(PEERS / "gguf"))
    gguf = pytest.importorskip("gguf")
    place = tmp_path / "model"
    place.mkdir()
    shutil.copy(files[0], place / "model.gguf")
    shutil.copy(smollm2 / "tokenizer.json", place)
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:60]
    small = tmp_path / "small.gguf"
    report = run(place, lambda edit: edit.prune(corpus=sources), small)
    assert "60 documents into the same" in report.checked[0]
    before, after = gguf.GGUFReader(files[0]), gguf.GGUFReader(small)
    moves = {int(old): new for old, new in json.loads((tmp_path / "small.token_map.json").read_text()).items()}
    kept = np.array(sorted(moves))
    assert 10_000 < len(kept) < 13_000
    assert small.stat().st_size < 0.8 * files[0].stat().st_size
    for one, other in zip(before.tensors, after.tensors, strict=True):
        assert one.name == other.name
        assert one.tensor_type == other.tensor_type
        assert np.array_equal(one.data[kept] if one.name == EMBEDDING else one.data, other.data)
    tokens = before.fields["tokenizer.ggml.tokens"].contents()
    assert after.fields["tokenizer.ggml.tokens"].contents() == [tokens[old] for old in kept.tolist()]
    if not (PEERS / "llama-cpp" / "ready").exists():
        pytest.skip("llama.cpp is not here: run `make sweep-llama-cpp`")
    for text in ("def __init__(self, name):", "import os\nimport sys\n\nclass"):
        (tmp_path / "prompt.txt").write_text(text)
        first, second = (greedy(file, tmp_path / "prompt.txt", 12) for file in (files[0], small))
        assert [moves[old] for old in first["prompt"]] == second["prompt"]
        assert [moves[old] for old in first["greedy"]] == second["greedy"]
        assert first["logits"] == second["logits"]
    (tmp_path / "sources.txt").write_text("\n".join(path.read_text(encoding="utf-8") for path in sources[:20]))
    first, second = (greedy(file, tmp_path / "sources.txt", 0) for file in (files[0], small))
    assert len(first["prompt"]) > 50_000
    assert [moves.get(old) for old in first["prompt"]] == second["prompt"]
