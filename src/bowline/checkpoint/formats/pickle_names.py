"""The names that the pickle in `pytorch_model.bin` may use, and the records that represent them.

The allowlist is `NAMES`. No name is looked up in torch or in any other module; only `pickle_machine` gives it a
meaning.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from bowline.checkpoint.formats.dtypes import BITS
from bowline.checkpoint.formats.strict_json import shown

__all__ = [
    "NAMES",
    "OTHER_TENSORS",
    "SUBCLASS",
    "WITHOUT_DTYPE",
    "Attributed",
    "Name",
    "Storage",
    "TensorClaim",
    "kind_of",
]

_Role = Literal["call", "storage", "dtype"]


@dataclass(frozen=True, slots=True)
class Name:
    """A name that a pickle may use: a record in place of the class or function itself.

    For a storage class or a dtype, `dtype` is safetensors' name of the elements (`None` if it has none) and `itemsize`
    is their size in bytes.
    """

    path: str
    role: _Role
    dtype: str | None = None
    itemsize: int = 1


@dataclass(frozen=True, slots=True)
class Storage:
    """The storage of one or more tensors as the file claims it: the entry `data/key`, `numel` elements of a class."""

    key: str
    type: Name
    numel: int

    @property
    def nbytes(self) -> int:
        """The number of bytes that the entry must have."""
        return self.numel * self.type.itemsize


@dataclass(frozen=True, slots=True)
class TensorClaim:
    """A view of a storage, as the file claims it: `offset` and `strides` count elements, and are not checked yet."""

    storage: Storage
    dtype: Name
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Attributed(dict[object, object]):
    """Represents an OrderedDict, the only dictionary that may have attributes (which are dropped)."""

    __slots__ = ()


_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2": "F8_E5M2",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "complex64": "C64",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}
_STORAGES = {
    "Double": "F64",
    "Float": "F32",
    "Half": "F16",
    "BFloat16": "BF16",
    "ComplexFloat": "C64",
    "Long": "I64",
    "Int": "I32",
    "Short": "I16",
    "Char": "I8",
    "Byte": "U8",
    "Bool": "BOOL",
}
WITHOUT_DTYPE = ("torch.storage.UntypedStorage", "torch.UntypedStorage", "torch.storage._UntypedStorage")
_CALLS = (
    "collections.OrderedDict",
    "torch.Size",
    "torch._utils._rebuild_tensor",
    "torch._utils._rebuild_tensor_v2",
    "torch._utils._rebuild_tensor_v3",
    "torch._utils._rebuild_parameter",
    "torch._utils._rebuild_parameter_with_state",
)

_ALLOWED = (
    *(Name(path, "call") for path in _CALLS),
    *(Name(f"torch.{name}", "dtype", dtype, BITS[dtype] // 8) for name, dtype in _DTYPES.items()),
    *(Name(f"torch.{name}Storage", "storage", dtype, BITS[dtype] // 8) for name, dtype in _STORAGES.items()),
    *(Name(path, "storage", "U8") for path in WITHOUT_DTYPE),  # torch reads these as bytes, too
    Name("torch.complex128", "dtype", None, 16),  # allowed, so that a file that only mentions it can be read
    Name("torch.complex32", "dtype", None, 4),
    Name("torch.ComplexDoubleStorage", "storage", None, 16),
)
NAMES: Final[Mapping[tuple[str, str], Name]] = {
    (name.path.rpartition(".")[0], name.path.rpartition(".")[2]): name for name in _ALLOWED
}

SUBCLASS: Final = "torch._tensor._rebuild_from_type_v2"
"""What a pickle asks for first if a value is a subclass of a tensor."""

OTHER_TENSORS: Final[Mapping[str, str]] = {
    "torch._utils._rebuild_qtensor": "a quantized tensor",
    "torch._utils._rebuild_sparse_tensor": "a sparse tensor",
    "torch._utils._rebuild_sparse_csr_tensor": "a sparse tensor",
    "torch._utils._rebuild_nested_tensor": "a nested tensor",
    "torch._utils._rebuild_meta_tensor_no_storage": "a meta tensor, which has no values",
    "torch._utils._rebuild_wrapper_subclass": "a tensor subclass",
    SUBCLASS: "a tensor subclass, such as a DTensor of FSDP2",
    "torch._utils._rebuild_device_tensor_from_numpy": "a tensor of a device without storages",
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": "a tensor of a device without storages",
    "torch._utils._rebuild_xla_tensor": "a tensor of a device without storages",
    **{f"torch.{kind}Storage": "a quantized storage" for kind in ("QInt8", "QInt32", "QUInt8", "QUInt4x2", "QUInt2x4")},
    "torch.storage.TypedStorage": "a storage that does not say its dtype",
    "torch.float4_e2m1fn_x2": "a dtype of two elements in a byte",
}


def kind_of(value: object) -> str:
    """The kind of a value in a few words, without its content, which may be of any size."""
    match value:
        case Name():
            return repr(value.path)
        case Storage():
            return "a storage"
        case TensorClaim():
            return "a tensor"
        case dict() | list() | tuple():
            kind = "dictionary" if isinstance(value, dict) else type(value).__name__
            return f"a {kind} of {len(value)}"
        case str():
            return f"the text {shown(value)}"
        case bytes():
            return f"{len(value)} bytes"
        case None | bool():
            return str(value)
        case _:  # an int or a float, and run_pickle makes no large ones
            return f"the number {value}"
