"""Reads the pickle in `pytorch_model.bin` without executing it.

A pickle is a program: for `pickle.Unpickler`, even one with a strict `find_class`, opcodes call constructors, set
attributes and ask objects for their `__setstate__`, and every release of Python decides anew what that can reach. So
there is no unpickler here. `pickletools.genops`, the standard library's disassembler, splits the bytes into opcodes;
a machine of some thirty of them works on plain values and on three records of its own (a name, a storage, a tensor).
It cannot execute anything, because it has nothing to execute:

- No name is ever looked up in a module. `GLOBAL` and `STACK_GLOBAL` look for the text among the keys of `NAMES` and
  push the record that is there. There is no torch here, and no `getattr`, `setattr`, `__import__` or `eval`.
- `REDUCE` is a `match` over those records. Each case builds a tuple, a dictionary or a record from checked values.
- `BUILD` drops its state. It is there since state dictionaries carry an attribute, `_metadata`.
- Every opcode that is not listed (`INST`, `OBJ`, `NEWOBJ`, `NEWOBJ_EX`, `EXT1`, `DUP`, ...) is refused by its name.

Nothing loops or recurses over what the file builds, dictionaries have text and small integers as keys (whose hashes
do not collide), and every opcode costs a bounded number of bytes beside its own argument: time and memory follow
`LARGEST_PICKLE` and `MOST_OPCODES`, whatever the lengths and counts in the file say.
"""

from __future__ import annotations

import io
import pickletools
from typing import Final

from bowline.checkpoint.formats.pickle_names import (
    NAMES,
    OTHER_TENSORS,
    SUBCLASS,
    WITHOUT_DTYPE,
    Attributed,
    Name,
    Storage,
    TensorClaim,
    kind_of,
)
from bowline.checkpoint.formats.strict_json import shown
from bowline.checkpoint.formats.torch_archive import CONVERT
from bowline.errors import FormatError, UnsafePickleError

__all__ = ["DEEPEST_MARK", "LARGEST_PICKLE", "MOST_OPCODES", "run_pickle"]

LARGEST_PICKLE: Final = 32 << 20
"""The most bytes of `data.pkl` that are read: some 200 are needed for a tensor."""

MOST_OPCODES: Final = 1 << 21
"""The most opcodes that are followed: some 35 are needed for a tensor, so this is for more than 50,000."""

DEEPEST_MARK: Final = 128
"""The most marks open at once; a state dictionary has four."""

FULL: Final = (
    "save the full tensors of a sharded model: get_model_state_dict(model, options=StateDictOptions("
    "full_state_dict=True)) of torch.distributed.checkpoint.state_dict"
)

_LONGEST_LINE = 1024
_FRAME_BYTES = 9  # the opcode and its length
_MOST_AXES = 64  # as many as torch has
_TOO_LARGE = 1 << 63  # torch counts elements and bytes in an int64
_LARGEST_NUMBER = 1 << 128  # a seed or a step has at most 64 bits


def run_pickle(data: bytes, where: str) -> object:
    r"""The value that `data.pkl` describes, with a `TensorClaim` for each tensor; `where` begins every message.

    Dictionaries, lists, tuples, text, bytes, numbers and None are themselves; an OrderedDict is a dictionary; a
    tensor, a storage and a dtype are records of what the file says of them. The value may contain itself.

    Raises:
        UnsafePickleError: the pickle asks for anything else; the message names it.
        FormatError: it is malformed or over a limit, or asks for tensors that are not dense and of plain dtypes.

    Example:
        >>> run_pickle(b"\x80\x02}X\x01\x00\x00\x00ncposix\nsystem\n.", "data.pkl")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        bowline.errors.UnsafePickleError: data.pkl: the pickle asks for 'posix.system', expected only tensors (help: ...
    """
    if len(data) > LARGEST_PICKLE:
        raise FormatError(f"{where}: a pickle of {len(data)} bytes, expected at most {LARGEST_PICKLE}", help=CONVERT)
    return _Machine(where).run(data)


class _PlainLines(io.BytesIO):
    """The disassembler's input, which allows only short lines without escapes in text opcodes, as torch writes them.

    A long line may be a number, and reading it takes time quadratic in its length. The disassembler resolves a
    backslash where an unpickler does not, so that `S\\x69ze` would be `Size` to us and not to torch.
    """

    def readline(self, size: int | None = -1, /) -> bytes:
        line = super().readline(_LONGEST_LINE)
        if b"\\" in line:
            raise ValueError("a backslash in a name or a number")
        return line


class _Machine:
    """Runs the opcodes of `data.pkl` on plain values. See the module's docstring for why it can do nothing else."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._stack: list[object] = []
        self._below: list[list[object]] = []  # the stacks under the open marks
        self._memo: dict[int, object] = {}
        self._storages: dict[str, Storage] = {}

    def run(self, data: bytes) -> object:
        """Run the pickle and return the one value that it leaves on the stack."""
        operations = pickletools.genops(_PlainLines(data))
        for count in range(MOST_OPCODES):
            try:
                opcode, argument, position = next(operations)
            except ValueError as error:  # cut off, a length past the end, an unknown opcode, invalid text
                raise self._malformed(f"opcode {count}: {shown(str(error))}") from error
            ahead = len(data) - (position or 0)
            if opcode.name == "FRAME" and isinstance(argument, int) and argument > ahead - _FRAME_BYTES:
                raise self._malformed(f"a frame of {argument} bytes, but only {ahead - _FRAME_BYTES} are left")
            if opcode.name == "STOP":
                if ahead != 1:
                    raise self._malformed("bytes after its end, expected none")
                if len(self._stack) != 1 or self._below:
                    raise self._malformed(
                        f"{len(self._stack)} values and {len(self._below)} marks at its end, expected one value"
                    )
                return self._stack[0]
            self._step(opcode.name, argument)
        raise self._malformed(f"more than {MOST_OPCODES} opcodes")

    def _step(self, opcode: str, argument: object) -> None:  # noqa: C901 - one case per opcode
        stack = self._stack
        match opcode:
            case "BINPUT" | "LONG_BINPUT" if isinstance(argument, int):
                self._memo[argument] = self._top()
            case "MEMOIZE":
                self._memo[len(self._memo)] = self._top()
            case "BINGET" | "LONG_BINGET" if isinstance(argument, int):
                if argument not in self._memo:
                    raise self._malformed(f"memo {argument} is read, but was never set")
                stack.append(self._memo[argument])
            case "BININT" | "BININT1" | "BININT2" | "LONG1" | "LONG4" | "INT" | "LONG" if isinstance(argument, int):
                if abs(argument) >= _LARGEST_NUMBER:
                    raise self._malformed(f"a number of {argument.bit_length()} bits")
                stack.append(argument)
            case "BINUNICODE" | "SHORT_BINUNICODE" | "BINUNICODE8" | "BINBYTES" | "SHORT_BINBYTES" | "BINBYTES8":
                stack.append(argument)
            case "BINFLOAT":
                stack.append(argument)
            case "SHORT_BINSTRING" | "BINSTRING" if isinstance(argument, str):  # text written by Python 2
                if not argument.isascii():
                    raise self._malformed(f"the bytes {shown(argument)} in place of text, expected ASCII")
                stack.append(argument)
            case "MARK":
                if len(self._below) >= DEEPEST_MARK:
                    raise self._malformed(f"more than {DEEPEST_MARK} open marks")
                self._below.append(stack)
                self._stack = []
            case "TUPLE":
                items = self._since_mark()
                self._stack.append(tuple(items))
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                items = [self._pop() for _ in range(int(opcode[-1]))]
                stack.append(tuple(reversed(items)))
            case "EMPTY_TUPLE":
                stack.append(())
            case "EMPTY_LIST":
                stack.append([])
            case "EMPTY_DICT":
                stack.append({})
            case "NONE":
                stack.append(None)
            case "NEWTRUE" | "NEWFALSE":
                stack.append(opcode == "NEWTRUE")
            case "APPEND":
                self._extend([self._pop()])
            case "APPENDS":
                self._extend(self._since_mark())
            case "SETITEM":
                value, key = self._pop(), self._pop()
                self._set_items([key, value])
            case "SETITEMS":
                self._set_items(self._since_mark())
            case "GLOBAL" if isinstance(argument, str):
                module, _, name = argument.partition(" ")
                stack.append(self._name(module, name))
            case "STACK_GLOBAL":
                qualname, where = self._pop(), self._pop()
                if not isinstance(where, str) or not isinstance(qualname, str):
                    raise self._malformed(f"a name made of {kind_of(where)} and {kind_of(qualname)}, expected text")
                stack.append(self._name(where, qualname))
            case "BINPERSID":
                stack.append(self._storage(self._pop()))
            case "REDUCE":
                arguments, function = self._pop(), self._pop()
                stack.append(self._call(function, arguments))
            case "BUILD":
                state, target = self._pop(), self._top()
                if not isinstance(target, Attributed) or not isinstance(state, dict):
                    raise self._unsafe(f"to set the state of {kind_of(target)} to {kind_of(state)}")
            case "PROTO":
                if argument not in (1, 2, 3, 4, 5):
                    raise self._malformed(f"protocol {argument}, expected 1 to 5")
            case "FRAME":
                pass  # a length to read ahead, which `run` has checked; the opcodes inside need nothing else
            case "INST" if isinstance(argument, str):
                raise self._unsafe(f"for {shown(argument.replace(' ', '.', 1))} (opcode INST)")
            case "EXT1" | "EXT2" | "EXT4":
                raise self._unsafe(f"for extension {argument} (opcode {opcode})")
            case "NEWOBJ" | "NEWOBJ_EX":
                items = [self._pop() for _ in range(2 if opcode == "NEWOBJ" else 3)]
                raise self._unsafe(f"for an object of {kind_of(items[-1])} (opcode {opcode})")
            case "OBJ":
                items = self._since_mark()
                made_of = kind_of(items[0]) if items else "nothing"
                raise self._unsafe(f"for an object of {made_of} (opcode OBJ)")
            case _:
                raise self._unsafe(f"for the opcode {opcode}, which torch.save does not write")

    def _top(self) -> object:
        if not self._stack:
            raise self._malformed("an opcode finds no value on the stack")
        return self._stack[-1]

    def _pop(self) -> object:
        value = self._top()
        self._stack.pop()
        return value

    def _since_mark(self) -> list[object]:
        if not self._below:
            raise self._malformed("an opcode finds no mark on the stack")
        items, self._stack = self._stack, self._below.pop()
        return items

    def _extend(self, items: list[object]) -> None:
        target = self._top()
        if not isinstance(target, list):
            raise self._unsafe(f"to append to {kind_of(target)}")
        target.extend(items)

    def _set_items(self, items: list[object]) -> None:
        target = self._top()
        if not isinstance(target, dict):
            raise self._unsafe(f"to set items of {kind_of(target)}")
        if len(items) % 2:
            raise self._malformed("a key without its value")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not isinstance(key, str) and not (isinstance(key, int) and abs(key) < 1 << 60):
                raise self._malformed(f"a dictionary with {kind_of(key)} as key, expected text")
            if key in target:
                raise self._malformed(f"the key {shown(key)} occurs twice in one dictionary, expected once")
            target[key] = value

    def _name(self, module: str, name: str) -> Name:
        found = NAMES.get((module, name))
        if found is not None:
            return found
        path = f"{module[:200]}.{name[:200]}"
        if path in OTHER_TENSORS:
            raise FormatError(
                f"{self._where}: the pickle asks for {path!r} ({OTHER_TENSORS[path]}), "
                "expected dense tensors of plain dtypes",
                help=FULL if path == SUBCLASS else CONVERT,
            )
        raise self._unsafe(f"for {shown(path)}")

    def _storage(self, identity: object) -> Storage:
        match identity:
            case ("storage", Name(role="storage") as kind, str(key), str(), int(numel)) if isinstance(
                identity, tuple
            ) and _is_size(numel):
                if not (len(key) <= 20 and key.isascii() and key.isdigit()):
                    raise self._malformed(f"a storage called {shown(key)}, expected a number")
                storage = Storage(key, kind, numel)
                if self._storages.setdefault(key, storage) != storage:
                    raise self._malformed(f"storage {key} has two types or sizes, expected one")
                return self._storages[key]
            case _:
                raise self._malformed(
                    f"it has {kind_of(identity)} in place of a storage, "
                    "expected ('storage', its class, its key, its device, its length)"
                )

    def _call(self, function: object, arguments: object) -> object:
        """The record or value that represents `function(*arguments)`, for the seven allowed functions."""
        if not isinstance(function, Name) or function.role != "call":
            raise self._unsafe(f"to call {kind_of(function)}")
        if not isinstance(arguments, tuple):
            raise self._malformed(f"{function.path} called with {kind_of(arguments)}, expected a tuple")
        match function.path.rpartition(".")[2], arguments:
            case "OrderedDict", ():
                return Attributed()
            case "Size", (tuple() as sizes,) if _are_sizes(sizes):
                return sizes
            case "_rebuild_tensor", (Storage() as storage, offset, shape, strides):
                return self._tensor(storage, storage.type, offset, shape, strides)
            case "_rebuild_tensor_v2", (Storage() as storage, offset, shape, strides, bool(), dict(), *metadata):
                self._refuse_lazy(metadata)
                return self._tensor(storage, storage.type, offset, shape, strides)
            case (
                "_rebuild_tensor_v3",
                (Storage() as storage, offset, shape, strides, bool(), dict(), Name(role="dtype") as dtype, *metadata),
            ) if storage.type.path in WITHOUT_DTYPE:
                self._refuse_lazy(metadata)
                return self._tensor(storage, dtype, offset, shape, strides)
            case ("_rebuild_parameter", (TensorClaim() as tensor, bool(), dict())) | (
                "_rebuild_parameter_with_state",
                (TensorClaim() as tensor, bool(), dict(), _),
            ):
                return tensor
            case _:
                raise self._malformed(f"{function.path} with arguments that it does not take: {kind_of(arguments)}")

    def _tensor(self, storage: Storage, dtype: Name, offset: object, shape: object, strides: object) -> TensorClaim:
        if (
            not (isinstance(offset, int) and _is_size(offset))
            or not (isinstance(shape, tuple) and _are_sizes(shape))
            or not (isinstance(strides, tuple) and _are_sizes(strides))
            or len(shape) != len(strides)
        ):
            raise self._malformed(
                "a tensor's offset, shape and strides, expected whole numbers from 0 and one stride for each axis"
            )
        return TensorClaim(storage, dtype, offset, shape, strides)

    def _refuse_lazy(self, metadata: list[object]) -> None:
        """Raise `FormatError` for torch's lazy flags, by which values are conjugated or negated when they are read."""
        flags = metadata[0] if metadata else None
        if flags is None:
            return
        if len(metadata) > 1 or not isinstance(flags, dict):
            raise self._malformed(f"tensor metadata of {kind_of(flags)}, expected a dictionary")
        if flags:
            raise FormatError(
                f"{self._where}: a tensor has the lazy flag {shown(next(iter(flags)))}, expected plain stored values",
                help="call .resolve_conj().resolve_neg() on it before torch.save",
            )

    def _malformed(self, seen: str) -> FormatError:
        return FormatError(
            f"{self._where}: the pickle is malformed: {seen}",
            help="fetch the file again, or save it again with torch.save",
        )

    def _unsafe(self, request: str) -> UnsafePickleError:
        return UnsafePickleError(
            f"{self._where}: the pickle asks {request}, expected only tensors",
            help=(
                "get the weights as safetensors; torch.load(path, weights_only=True) refuses harmful pickles, and "
                "weights_only=False runs what this file asks for"
            ),
        )


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value < _TOO_LARGE  # and not a bool


def _are_sizes(values: tuple[object, ...]) -> bool:
    # the length first: a pickle may ask about one long tuple a million times
    return len(values) <= _MOST_AXES and all(map(_is_size, values))
