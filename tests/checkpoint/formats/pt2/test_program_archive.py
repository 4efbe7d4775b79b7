"""The reader of torch.export's programs: what torch stored, damaged archives, and hostile ones."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import tracemalloc
import warnings
import zipfile
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from bowline.checkpoint.formats.graphs.graph_model import GraphModel
from bowline.checkpoint.formats.pt2 import payloads, program_archive
from bowline.checkpoint.formats.pt2.program_archive import read_pt2
from bowline.errors import BowlineError, CheckpointError
from tests.checkpoint.formats.onnx.test_graph import Memory
from tests.checkpoint.formats.pt2.pt2_files import TinyLM, changed, entries, packed, program

WEIGHTS, CONSTANTS = "data/weights/model_weights_config.json", "data/constants/model_constants_config.json"
GRAPH = "models/model.json"
made = functools.cache(lambda kind="tied": program(TinyLM(kind)))


def read(raw: bytes) -> GraphModel:
    return read_pt2(Memory(model__pt2=raw), "model.pt2")


def refused(raw: bytes) -> str:
    """The message about a file that is refused: one printable line that begins with the file's name, and a way out."""
    with pytest.raises(CheckpointError) as caught:
        read(raw)
    assert caught.value.help
    assert caught.value.message.startswith("model.pt2: ")
    assert caught.value.message.isprintable()
    assert len(caught.value.message) < 600
    return caught.value.message


def ends(raw: bytes) -> tuple[str | None, list[str]]:
    model = read(raw)
    return model.table, [head.tensor for head in model.heads]


# --- tensors and ends -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_every_tensor_is_where_torch_stored_it(dtype: torch.dtype) -> None:
    module = TinyLM("untied").to(dtype)
    raw = program(module)
    model = read(raw)
    assert set(model.tensors) == set(module.state_dict())
    for name, one in module.state_dict().items():
        mine = model.tensors[name]
        assert mine.shape == tuple(one.shape)
        stored = raw[mine.offset : mine.offset + mine.nbytes]
        assert stored == one.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("decomposed", [False, True])
@pytest.mark.parametrize("strict", [False, True])
def test_two_names_of_one_payload_are_one_stored_tensor(strict: bool, decomposed: bool) -> None:
    raw = program(TinyLM(), strict=strict, decomposed=decomposed)
    assert ends(raw) == ("embed.weight", ["lm_head.weight"])
    model = read(raw)
    assert model.tensors["embed.weight"].same_storage(model.tensors["lm_head.weight"])
    other = read(program(TinyLM("cloned"), strict=strict, decomposed=decomposed))
    assert not other.tensors["embed.weight"].same_storage(other.tensors["lm_head.weight"])


class Product(nn.Module):
    """A look-up and a head that are written out as operators."""

    def __init__(self, compute: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Parameter(torch.randn(96, 16))
        self.own = nn.Parameter(torch.randn(96, 16))
        self.turned = nn.Parameter(torch.randn(16, 96))
        self.compute = compute

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.compute(self, ids)


@pytest.mark.parametrize(
    ("compute", "table", "head"),
    [
        (lambda m, ids: nn.functional.embedding(ids, m.table) @ m.own.T, "table", "own"),
        (lambda m, ids: m.table[ids] @ m.own.transpose(-1, -2), "table", "own"),
        (lambda m, ids: m.table.index_select(0, ids.flatten()).mm(m.own.permute(1, 0)), "table", "own"),
        (lambda m, ids: nn.functional.linear(m.table[ids].relu(), m.own).softmax(-1), "table", "own"),
        (lambda m, ids: m.table[ids] @ m.turned, "table", "turned"),
        (lambda m, ids: torch.addmm(ids.new_zeros(96).float(), m.table[ids.flatten()], m.own.t()), "table", "own"),
        (lambda m, ids: nn.functional.linear(m.table[ids], m.table) / 2, "table", "table"),
    ],
)
def test_the_ends_are_found_by_what_the_graph_does(compute: Any, table: str, head: str) -> None:
    assert ends(program(Product(compute))) == (table, [head])
    assert ends(program(Product(compute), decomposed=True)) == (table, [head])


def test_a_head_that_is_stored_the_other_way_round_has_the_rows_of_the_vocabulary_first() -> None:
    model = read(program(Product(lambda m, ids: m.table[ids] @ m.turned)))
    assert (model.tensors["turned"].shape, model.tensors["turned"].strides) == ((96, 16), (1, 96))


def test_a_transposed_view_of_the_table_is_the_table() -> None:
    module = Product(lambda m, ids: m.table[ids] @ m.turned)
    module.turned = nn.Parameter(module.table.detach().t())
    model = read(program(module))
    assert model.tensors["turned"].same_storage(model.tensors["table"])


def test_a_head_within_the_graph_of_a_node_is_found() -> None:
    def compute(m: Any, ids: torch.Tensor) -> torch.Tensor:
        hidden = m.table[ids]
        with torch.no_grad():
            logits: torch.Tensor = nn.functional.linear(hidden, m.own)
        return logits + 1

    raw = program(Product(compute))
    assert b"wrap_with_set_grad_enabled" in entries(raw)[GRAPH]
    assert ends(raw) == ("table", ["own"])


def test_an_encoder_has_no_head() -> None:
    assert ends(program(Product(lambda m, ids: m.table[ids].tanh()))) == ("table", [])


# --- damage -----------------------------------------------------------------------------------------------------------


def config(change: Callable[[Any], object], name: str = "embed.weight") -> bytes:
    return changed(made(), WEIGHTS, lambda document: change(document["config"][name]))


def meta(key: str, value: object) -> bytes:
    return config(lambda entry: entry["tensor_meta"].update({key: value}))


def without(*names: str) -> bytes:
    return packed({name: raw for name, raw in entries(made()).items() if name not in names})


def replaced(name: str, raw: bytes) -> bytes:
    return packed({**entries(made()), name: raw})


def spoilt(name: str) -> bytes:
    """The archive with one byte of an entry changed, but not its checksum."""
    raw, content = bytearray(made()), entries(made())[name]
    raw[raw.index(content) + len(content) // 2] ^= 1
    return bytes(raw)


def as_int(*numbers: object) -> list[dict[str, object]]:
    return [{"as_int": number} for number in numbers]


DAMAGES: dict[str, tuple[Callable[[], bytes], str]] = {
    "nothing": (lambda: b"", "begins with b''"),
    "text": (lambda: b"hello" * 100, "expected the zip archive that torch.export.save writes"),
    "a pickle": (lambda: b"\x80\x02}." * 9, "a bare pickle"),
    "cut": (lambda: made()[:-100], "does not end like a zip archive"),
    "an entry twice": (lambda: twice(WEIGHTS), "two entries are called"),
    "a bomb": (lambda: packed(entries(made()), method=zipfile.ZIP_DEFLATED), "is compressed (DEFLATE)"),
    "no format": (lambda: without("archive_format"), "has no archive_format"),
    "another format": (lambda: replaced("archive_format", b"pt3"), "its archive_format is b'pt3'"),
    "another version": (lambda: replaced("archive_version", b"1"), "its archive_version is b'1', expected b'0'"),
    "big-endian": (lambda: replaced("byteorder", b"big"), "its byte order is b'big'"),
    "no config": (lambda: without(WEIGHTS), f"has no {WEIGHTS}"),
    "no constants": (lambda: without(CONSTANTS), f"has no {CONSTANTS}"),
    "no graph": (lambda: without(GRAPH), "an archive without a program"),
    "two graphs": (lambda: replaced("models/other.json", b"{}"), "2 programs ('model', 'other'), expected one"),
    "no payload": (lambda: without("data/weights/weight_0"), "'embed.weight' is in 'data/weights/weight_0', which is"),
    "a short payload": (lambda: replaced("data/weights/weight_0", b"abcd"), "but its storage has 4 bytes"),
    "a changed config": (lambda: spoilt(WEIGHTS), "does not match the archive's checksum"),
    "a changed graph": (lambda: spoilt(GRAPH), "does not match the archive's checksum"),
    "no JSON": (lambda: replaced(WEIGHTS, b"{"), "not JSON at character"),
    "deep JSON": (lambda: replaced(GRAPH, b"[" * 10**6), "levels of nested arrays"),
    "a key twice": (lambda: replaced(WEIGHTS, b'{"config": {}, "config": {}}'), "occurs twice"),
    "a list": (lambda: replaced(WEIGHTS, b"[]"), "an array of 0, expected an object with 'config'"),
    "a weight that is a constant": (
        lambda: replaced(CONSTANTS, entries(made())[WEIGHTS].replace(b"weight_", b"tensor_")),
        "'embed.weight' is a weight and a constant",
    ),
    "no dtype": (lambda: config(lambda entry: entry["tensor_meta"].pop("dtype")), "without 'dtype'"),
    "a dtype of tomorrow": (lambda: meta("dtype", 99), "has the dtype 99"),
    "a dtype that is true": (lambda: meta("dtype", True), "'dtype' is true, expected a number"),
    "a long name": (
        lambda: changed(made(), WEIGHTS, lambda document: document["config"].update({"x" * 5000: {}})),
        "a name has 5000 characters",
    ),
    "a negative size": (lambda: meta("sizes", as_int(-96, 16)), "sizes of 'embed.weight' is -96"),
    "a huge size": (lambda: meta("sizes", as_int(2**63, 16)), "sizes of 'embed.weight' is 9223372036854775808"),
    "a size too large": (lambda: meta("sizes", as_int(2**40, 16)), "reaches to byte"),
    "a size of 600 digits": (lambda: meta("sizes", as_int(10**599, 16)), "(600 characters)"),
    "a symbolic size": (lambda: meta("sizes", [{"as_expr": "s0"}, {"as_int": 16}]), "without 'as_int'"),
    "many axes": (lambda: meta("sizes", as_int(*[1] * 65)), "has 65 axes"),
    "too few strides": (lambda: meta("strides", as_int(1)), "has 2 sizes and 1 strides"),
    "an offset": (lambda: meta("storage_offset", {"as_int": 9}), "from element 9 reaches to byte"),
    "a negative offset": (lambda: meta("storage_offset", {"as_int": -1}), "storage_offset of 'embed.weight' is -1"),
    "a terabyte of one number": (
        lambda: changed(made(), WEIGHTS, lambda document: repeated(document["config"]["embed.weight"])),
        "repeats its bytes up to",
    ),
    "another schema": (
        lambda: changed(made(), GRAPH, lambda document: document["schema_version"].update(major=9)),
        "its schema has the version 9, expected 8",
    ),
    "a parameter that is not stored": (
        lambda: changed(made(), WEIGHTS, lambda document: document["config"].pop("norm.weight")),
        "the graph uses 'norm.weight', which is not stored",
    ),
    "a node without inputs": (
        lambda: changed(made(), GRAPH, lambda document: graph_of(document)["nodes"][0].pop("inputs")),
        "without 'inputs'",
    ),
    "nodes that are a text": (
        lambda: changed(made(), GRAPH, lambda document: graph_of(document).update(nodes="x")),
        "'nodes' is 'x', expected an array",
    ),
}


def twice(name: str) -> bytes:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # zipfile warns of the second entry
        return packed(entries(made()), twice=name)


def repeated(entry: Any) -> None:
    entry["tensor_meta"].update(sizes=as_int(2**20, 2**20), strides=as_int(0, 0))


def graph_of(document: Any) -> Any:
    return document["graph_module"]["graph"]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_archive_is_one_clear_line(damage: str) -> None:
    make, said = DAMAGES[damage]
    assert said in refused(make())


def test_an_earlier_format_of_torch_export_is_named() -> None:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("serialized_exported_program.json", "{}")
        archive.writestr("version", "8.2")
    assert "an earlier format of torch.export.save" in refused(file.getvalue())


def test_a_package_of_aotinductor_is_named() -> None:
    content = {name: raw for name, raw in entries(made()).items() if name.startswith(("archive", "byteorder"))}
    raw = packed({"data/aotinductor/model/abc.wrapper.so": b"\x7fELF", **content})
    assert "an AOTInductor package, whose weights are within compiled code" in refused(raw)


def test_random_damage_raises_nothing_but_bowlines_errors() -> None:
    raw = made("untied")
    rng = np.random.default_rng(0)
    read_all = 0
    for _ in range(600):
        damaged = bytearray(raw)
        for place in rng.integers(0, len(raw), rng.integers(1, 4)):
            damaged[place] = rng.integers(0, 256)
        if rng.random() < 0.3:
            begin = rng.integers(0, len(raw))
            del damaged[begin : begin + rng.integers(1, 40)]
        try:
            read(bytes(damaged))
            read_all += 1
        except BowlineError as error:
            assert error.message.isprintable()
    assert 0 < read_all < 600


def test_random_values_in_the_documents_raise_nothing_but_bowlines_errors() -> None:
    """Every value of both documents is replaced by values of other types."""
    values: list[object] = [None, True, -1, 2**62, "x", [], {}, [{}], {"as_tensor": {"name": 3}}, 1.5]
    for name in (WEIGHTS, GRAPH):
        places = list(paths(json_of(name)))
        rng = np.random.default_rng(1)
        for place in (places[at] for at in rng.integers(0, len(places), 300)):
            value = values[rng.integers(0, len(values))]
            with contextlib.suppress(BowlineError):
                read(changed(made(), name, functools.partial(put, place=place, value=value)))


def json_of(name: str) -> Any:
    return json.loads(entries(made())[name])


def paths(value: Any, so_far: tuple[Any, ...] = ()) -> Any:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*so_far, key)
        yield from paths(inner, (*so_far, key))


def put(document: Any, place: tuple[Any, ...], value: object) -> None:
    for key in place[:-1]:
        document = document[key]
    document[place[-1]] = value


def test_sizes_are_checked_before_memory_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_archive, "LARGEST_GRAPH", 1 << 20)
    monkeypatch.setattr(payloads, "LARGEST_CONFIG", 1 << 20)
    for name in (WEIGHTS, GRAPH):
        raw = replaced(name, b" " * (8 << 20))
        tracemalloc.start()
        try:
            assert "has 8388608 bytes, expected at most 1048576" in refused(raw)
            assert tracemalloc.get_traced_memory()[1] < 4 << 20
        finally:
            tracemalloc.stop()
