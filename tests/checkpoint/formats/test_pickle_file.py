"""`pytorch_model.bin` is read as torch saved it, without torch, and each extent is checked against the bytes."""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bowline.checkpoint.formats.pickle_file import PickledFile, read_pickle
from bowline.checkpoint.places.byte_source import LocalFile
from bowline.errors import FormatError
from tests.checkpoint.pickled import (
    FALSE,
    HOOKS,
    NONE,
    SIX,
    archive,
    archive_entry,
    call,
    dictionary,
    name,
    number,
    read,
    saved,
    sizes,
    storage,
    tensor,
    text,
    together,
    values,
)

# --- what is read ---------------------------------------------------------------------------------------------------


def test_a_tensor_comes_with_its_name_dtype_shape_and_extent() -> None:
    file = saved(dictionary({"weight": tensor()}))
    found = read(file)
    assert found.notes == ()
    assert list(found.tensors) == ["weight"]
    weight = found.tensors["weight"]
    assert (weight.name, weight.dtype, weight.shape, weight.strides) == ("weight", "F32", (2, 3), None)
    assert (weight.file, weight.nbytes) == ("pytorch_model.bin", 24)
    assert values(file, weight).tolist() == [[0, 1, 2], [3, 4, 5]]


def test_two_names_of_one_storage_are_one_stored_tensor() -> None:
    found = read(saved(dictionary({"wte.weight": tensor(), "lm_head.weight": tensor()})))
    assert found.tensors["wte.weight"].same_storage(found.tensors["lm_head.weight"])


def test_equal_bytes_in_two_storages_are_two_stored_tensors() -> None:
    other = tensor(of=storage("1"))
    found = read(saved(dictionary({"wte.weight": tensor(), "lm_head.weight": other}), {"0": SIX, "1": SIX}))
    assert not found.tensors["wte.weight"].same_storage(found.tensors["lm_head.weight"])


def test_different_views_of_one_storage_are_not_the_same_tensor() -> None:
    found = read(saved(dictionary({"all": tensor(), "row": tensor((3,), (1,), 3), "turned": tensor((3, 2), (1, 3))})))
    every, row, turned = (found.tensors[key] for key in ("all", "row", "turned"))
    assert (row.offset - every.offset, row.nbytes) == (12, 12)
    assert (turned.offset, turned.nbytes, turned.strides) == (every.offset, 24, (1, 3))
    assert not every.same_storage(row)
    assert not every.same_storage(turned)


def test_the_extent_of_a_column_spans_the_rows_between() -> None:
    file = saved(dictionary({"column": tensor((2,), (3,), 1)}))
    column = read(file).tensors["column"]
    assert (column.nbytes, column.strides) == (16, (3,))
    assert values(file, column).tolist() == [1, 4]


@pytest.mark.parametrize(
    ("shape", "strides"),
    [((1, 6), (1, 1)), ((1, 6), (0, 1)), ((6, 1), (1, 77)), ((2, 1, 3), (3, 1 << 40, 1)), ((), ())],
)
def test_strides_of_axes_of_length_one_mean_nothing(shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    assert read(saved(dictionary({"t": tensor(shape, strides)}))).tensors["t"].strides is None


@pytest.mark.parametrize(("shape", "strides"), [((0,), (1,)), ((3, 0), (0, 5)), ((0, 1 << 40), (1 << 40, 1))])
def test_a_tensor_without_elements_has_no_bytes_and_shares_none(
    shape: tuple[int, ...], strides: tuple[int, ...]
) -> None:
    empty = read(saved(dictionary({"t": tensor(shape, strides)}))).tensors["t"]
    assert (empty.shape, empty.nbytes, empty.strides) == (shape, 0, None)
    assert not empty.same_storage(empty)


@pytest.mark.parametrize(
    ("kind", "dtype", "itemsize"),
    [
        ("DoubleStorage", "F64", 8),
        ("FloatStorage", "F32", 4),
        ("HalfStorage", "F16", 2),
        ("BFloat16Storage", "BF16", 2),
        ("ComplexFloatStorage", "C64", 8),
        ("LongStorage", "I64", 8),
        ("IntStorage", "I32", 4),
        ("ShortStorage", "I16", 2),
        ("CharStorage", "I8", 1),
        ("ByteStorage", "U8", 1),
        ("BoolStorage", "BOOL", 1),
    ],
)
def test_each_storage_class_has_its_dtype(kind: str, dtype: str, itemsize: int) -> None:
    file = saved(dictionary({"t": tensor(of=storage(kind=kind))}), {"0": bytes(6 * itemsize)})
    found = read(file).tensors["t"]
    assert (found.dtype, found.nbytes) == (dtype, 6 * itemsize)


@pytest.mark.parametrize(
    ("torch_dtype", "dtype", "itemsize"),
    [
        ("float8_e4m3fn", "F8_E4M3", 1),
        ("float8_e5m2", "F8_E5M2", 1),
        ("float8_e8m0fnu", "F8_E8M0", 1),
        ("uint16", "U16", 2),
        ("uint32", "U32", 4),
        ("uint64", "U64", 8),
    ],
)
def test_dtypes_without_a_storage_class_stand_beside_bytes(torch_dtype: str, dtype: str, itemsize: int) -> None:
    of = storage(kind="UntypedStorage", numel=6 * itemsize, module="torch.storage")
    arguments = (of, number(2), sizes((4,)), sizes((1,)), FALSE, HOOKS, name("torch", torch_dtype))
    file = saved(dictionary({"t": call("torch._utils", "_rebuild_tensor_v3", *arguments)}), {"0": bytes(6 * itemsize)})
    found = read(file).tensors["t"]
    assert (found.dtype, found.nbytes) == (dtype, 4 * itemsize)


def test_parameters_and_the_first_rebuild_function_are_tensors_too() -> None:
    oldest = call("torch._utils", "_rebuild_tensor", storage(), number(0), sizes((6,)), sizes((1,)))
    parameter = call("torch._utils", "_rebuild_parameter", tensor(), b"\x88", HOOKS)
    with_state = call(
        "torch._utils", "_rebuild_parameter_with_state", tensor(), b"\x88", HOOKS, dictionary({"a": NONE})
    )
    sized = tensor().replace(sizes((2, 3)), call("torch", "Size", sizes((2, 3))))
    found = read(saved(dictionary({"a": oldest, "b": parameter, "c": with_state, "d": sized}))).tensors
    assert [found[key].shape for key in "abcd"] == [(6,), (2, 3), (2, 3), (2, 3)]
    assert found["b"].same_storage(found["c"])


def test_the_metadata_attribute_of_a_state_dict_is_dropped() -> None:
    metadata = dictionary({"_metadata": HOOKS + b"(" + text("") + dictionary({"version": number(1)}) + b"u"})
    state_dict = HOOKS + b"(" + text("weight") + tensor() + b"u" + metadata + b"b"
    assert list(read(saved(state_dict)).tensors) == ["weight"]


def test_what_is_no_tensor_is_left_out_and_noted() -> None:
    found = read(saved(dictionary({"weight": tensor(), "epoch": number(3), "args": dictionary({"lr": NONE})})))
    assert list(found.tensors) == ["weight"]
    assert found.notes == (
        "'epoch' is left out: the number 3, not a tensor",
        "'args' is left out: a dictionary of 1, not a tensor",
    )


def test_notes_are_few_and_short_however_much_is_left_out() -> None:
    many = {f"{index} {'x' * 500}": text("y" * 500) for index in range(300)}
    notes = read(saved(dictionary({"weight": tensor(), **many}))).notes
    assert len(notes) == 101
    assert notes[-1] == "and 200 more are left out"
    assert max(map(len, notes)) < 400


@pytest.mark.parametrize("key", ["state_dict", "model", "anything"])
def test_the_one_dictionary_of_tensors_inside_is_the_state_dict(key: str) -> None:
    found = read(saved(dictionary({key: dictionary({"weight": tensor()}), "step": number(9)})))
    assert list(found.tensors) == ["weight"]
    assert found.under == repr(key)
    assert found.notes == ("'step' is left out: the number 9, not a tensor",)


def test_tensors_at_the_top_are_under_no_key() -> None:
    assert read(saved(dictionary({"weight": tensor(), "args": dictionary({"lr": NONE})}))).under is None


@pytest.mark.parametrize(
    ("value", "seen"),
    [
        (dictionary({"a": dictionary({"w": tensor()}), "b": dictionary({"w": tensor()})}), "2 dictionaries of tensors"),
        (dictionary({"step": number(9)}), r"no tensors \('step': the number 9\)"),
        (dictionary({"a": dictionary({"b": dictionary({"w": tensor()})})}), "no tensors"),
        (tensor(), "it holds a tensor,"),
        (together(tensor()), "it holds a tuple of 1,"),
        (b"](" + tensor() + b"e", "it holds a list of 1,"),
        (b"}(" + number(1) + tensor() + b"u", "the key of a tensor is the number 1, expected text"),
    ],
)
def test_anything_but_a_dictionary_of_tensors_is_refused_with_what_was_seen(value: bytes, seen: str) -> None:
    with pytest.raises(FormatError, match=seen):
        read(saved(value))


def test_an_empty_state_dict_has_no_tensors() -> None:
    assert read(saved(b"}", {})) == PickledFile(tensors={}, notes=())


def test_a_checksum_that_does_not_hold_is_noted_since_torch_can_leave_it_out() -> None:
    file = saved(dictionary({"weight": tensor()}))
    pickled = archive_entry(file, "model/data.pkl")
    damaged = file.replace(struct.pack("<I", pickled.CRC), bytes(4))
    assert read(damaged).notes == ("data.pkl does not match the archive's checksum",)


@pytest.mark.parametrize("protocol", [1, 2, 3, 4, 5])
def test_every_binary_protocol_is_read(protocol: int) -> None:
    plain = {"a": 1, "b": [True, None, 2.5, "ü", b"bytes", -(2**40), ()], "c": {"d": (1, 2, 3, 4)}}
    if protocol < 3:
        plain["b"] = [True, None, 2.5, "ü", -(2**40)]  # bytes are a call of _codecs.encode there
    body = pickle.dumps(OrderedDict(plain), protocol)
    with pytest.raises(FormatError, match=r"no tensors \('a': the number 1, 'b': a list of"):
        read(archive({"data.pkl": body}))


# --- against torch ----------------------------------------------------------------------------------------------------


def torch_saved(value: object, **options: Any) -> bytes:
    torch = pytest.importorskip("torch")
    file = io.BytesIO()
    torch.save(value, file, **options)
    return file.getvalue()


def assert_read_back(truth: Mapping[str, Any], **options: Any) -> PickledFile:
    """What torch saves, the reader finds: the same names in the same order, shapes, and values by their extents."""
    torch = pytest.importorskip("torch")
    file = torch_saved(truth, **options)
    found = read(file)
    assert list(found.tensors) == list(truth)
    for key, expected in truth.items():
        stored = found.tensors[key]
        assert stored.shape == tuple(expected.shape)
        exact = expected.detach().to(torch.float32) if stored.dtype.startswith(("BF16", "F8")) else expected.detach()
        assert np.array_equal(values(file, stored), exact.numpy()), key
    return found


@pytest.mark.parametrize("protocol", [1, 2, 3, 4, 5])
def test_a_tied_model_is_read_as_torch_saved_it_and_its_tie_is_seen(protocol: int) -> None:
    torch = pytest.importorskip("torch")

    class Tied(torch.nn.Module):  # type: ignore[misc, name-defined, unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.wte = torch.nn.Embedding(11, 4)
            self.norm = torch.nn.LayerNorm(4)
            self.register_buffer("steps", torch.tensor(7))
            self.lm_head = torch.nn.Linear(4, 11, bias=False)
            self.lm_head.weight = self.wte.weight

    found = assert_read_back(Tied().state_dict(), pickle_protocol=protocol).tensors
    assert found["wte.weight"].same_storage(found["lm_head.weight"])
    assert not found["wte.weight"].same_storage(found["norm.weight"])


def test_views_are_read_as_torch_saved_them() -> None:
    torch = pytest.importorskip("torch")
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    views = {
        "base": base,
        "transposed": base.t(),
        "rows": base[1:3],
        "column": base[:, 2],
        "every other": base[::2, ::3],
        "one": base[2, 5],
        "permuted": base.reshape(2, 3, 4).permute(2, 0, 1),
        "expanded": base[:, :1].expand(4, 3),
        "none": base[4:],
        "parameter": torch.nn.Parameter(base.clone()),
    }
    found = assert_read_back(views).tensors
    assert found["transposed"].strides == (1, 6)
    assert found["rows"].strides is None


def test_dtypes_are_read_as_torch_saved_them() -> None:
    torch = pytest.importorskip("torch")
    small = torch.tensor([[0.0, 1.5, -2.0], [0.25, 3.0, 96.0]])
    names = (
        "float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2 int64 int32 int16 int8 uint8 bool complex64 uint16"
    )
    dtypes = [getattr(torch, dtype) for dtype in names.split()]
    tensors = {str(dtype): small.abs().to(dtype) for dtype in dtypes}
    assert_read_back(tensors)


def test_a_parameter_with_attributes_is_a_tensor() -> None:
    torch = pytest.importorskip("torch")
    parameter = torch.nn.Parameter(torch.ones(2, 3))
    parameter.note = "kept by torch"
    assert_read_back({"p": parameter})


def test_torch_files_on_disk_may_be_called_anything(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    for file_name in ("pytorch_model.bin", "model.v2.pt", "ünï.bin"):
        torch.save({"w": torch.ones(3)}, tmp_path / file_name)
        with LocalFile(tmp_path / file_name) as source:
            assert read_pickle(source).tensors["w"].shape == (3,)


def test_tensors_that_are_not_plain_bytes_are_refused_by_name() -> None:
    torch = pytest.importorskip("torch")
    one = torch.ones(2, 2)
    refused = {
        "a sparse tensor": one.to_sparse(),
        "a meta tensor": one.to("meta"),
        "lazy flag 'conj'": one.to(torch.complex64).conj(),
        "its dtype is torch.ComplexDoubleStorage, expected one that safetensors has": one.to(torch.complex128),
    }
    for seen, value in refused.items():
        with pytest.raises(FormatError, match=seen):
            read(torch_saved({"w": value}))


def test_a_tensor_subclass_such_as_a_shard_of_fsdp2_is_refused_by_name() -> None:
    """`torch.save` of a state dict whose values are DTensors asks for this function first."""
    with pytest.raises(FormatError, match=r"a tensor subclass, such as a DTensor of FSDP2.*full_state_dict=True"):
        read(saved(b"\x80\x02ctorch._tensor\n_rebuild_from_type_v2\n."))


def test_files_from_before_the_zip_format_say_how_to_convert() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(FormatError, match=r"before 1\.6.*help: convert it to safetensors on an isolated machine"):
        read(torch_saved({"w": torch.ones(2)}, _use_new_zipfile_serialization=False))


def test_a_big_endian_file_is_refused() -> None:
    with pytest.raises(FormatError, match=r"its byte order is b'big', expected b'little'"):
        read(saved(dictionary({"w": tensor()}), byteorder=b"big"))


@pytest.mark.parametrize("extra", ["constants.pkl", "code/__torch__.py"])
def test_torchscript_is_refused_with_its_own_way_out(extra: str) -> None:
    file = archive({"data.pkl": b"}.", extra: b"def forward(self): ..."}, method=zipfile.ZIP_DEFLATED)
    with pytest.raises(FormatError, match=r"a TorchScript archive.*help: .*torch\.jit\.load"):
        read(file)


BEYOND: Mapping[str, tuple[bytes, str]] = {
    "more elements than the storage has": (tensor((2, 4), (4, 1)), "reaches to byte 32"),
    "an offset past the storage": (tensor(offset=1), "reaches to byte 28"),
    "an empty view past the storage": (tensor((0,), (1,), 7), "reaches to byte 28"),
    "strides past the storage": (tensor(strides=(4, 1)), "reaches to byte 28"),
    "numbers that overflow an int64": (tensor((1 << 62, 1 << 62), (1 << 62, 1)), "fewer than 2^63 bytes"),
    "an empty tensor whose axes overflow": (tensor((0, 1 << 32, 1 << 32), (0, 0, 0)), "fewer than 2^63 bytes"),
    "a terabyte out of one element": (tensor((1 << 19, 1 << 19), (0, 0)), "repeats its bytes up to 1099511627776"),
    "a conjugate": (tensor(metadata=dictionary({"conj": b"\x88"})), "a tensor has the lazy flag 'conj'"),
    "a complex128": (tensor(of=storage(kind="ComplexDoubleStorage", numel=6)), "expected 96"),
    "a quantized storage": (storage(kind="QInt8Storage"), "'torch.QInt8Storage' (a quantized storage)"),
    "a storage of unknown dtype": (storage(kind="TypedStorage", module="torch.storage"), "does not say its dtype"),
    "a storage that is not there": (tensor(of=storage("1")), "storage 1 is missing, expected an entry data/1"),
    "a storage that is too short": (tensor(of=storage(numel=7)), "storage 0 has 24 bytes, expected 28"),
    "a storage that is too long": (tensor(of=storage(numel=5)), "storage 0 has 24 bytes, expected 20"),
    "a name with a lone surrogate": (b"}" + text("\ud800") + tensor() + b"s", r"a tensor is called '\ud800'"),
    "a name without end": (b"}" + text("x" * 5000) + tensor() + b"s", "name has 5000 characters"),
}


@pytest.mark.parametrize("what", BEYOND)
def test_a_tensor_that_its_storage_does_not_hold_is_refused(what: str) -> None:
    value, seen = BEYOND[what]
    with pytest.raises(FormatError) as caught:
        read(saved(value if value.startswith(b"}") else dictionary({"w": value})))
    assert seen in caught.value.message
    assert caught.value.message.isprintable()
