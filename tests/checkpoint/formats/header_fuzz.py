"""Random safetensors files, well formed and not, on which Bowline's header reader is held against safetensors.

    python -m tests.checkpoint.formats.header_fuzz --count 200000

For every file, either both read the same, or Bowline refuses it; and where safetensors reads what Bowline refuses,
one of `REASONS_TO_BE_STRICTER` holds, which is established here from the file and not from Bowline's answer.
"""

# ruff: noqa: T201 - a command, which prints

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from random import Random

from safetensors import SafetensorError, deserialize, safe_open

from bowline.checkpoint.formats.dtypes import BITS
from bowline.checkpoint.formats.safetensors_header import Header, read_header
from bowline.checkpoint.places.byte_source import MemoryBytes
from bowline.errors import FormatError

FILE_NAME = "fuzz.safetensors"

REASONS_TO_BE_STRICTER = (
    "the header does not start with {",
    "a duplicate tensor name",
    "a duplicate metadata key",
    "tensor information as an array",
    "tensor information with an extra field",
    "a dtype as an object",
    "a tensor without elements whose other axes overflow",
)


class DisagreementError(AssertionError):
    """Bowline and safetensors read one file differently, or Bowline refuses it without a known reason."""


# ------------------------------------------------------------------------------------------ what each reader says


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What a reader makes of a file, in terms that both readers have."""

    tensors: dict[str, tuple[str, tuple[int, ...], bytes]]  # dtype, shape, data
    order: list[str]  # the names of the tensors that have bytes, in the order of their bytes
    metadata: dict[str, str]


def safetensors_file(header: bytes, data: bytes = b"", *, length: int | None = None) -> bytes:
    """A file out of its parts; `length` is what the first eight bytes say, where that is not the truth."""
    return (len(header) if length is None else length).to_bytes(8, "little") + header + data


_scratch = Path("/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir())


def read_by_safetensors(file: bytes) -> Reading | None:
    """What safetensors makes of the file, by both of its doors; None where it rejects the file."""
    try:
        views = dict(deserialize(file))  # type: ignore[no-untyped-call]
    except SafetensorError:
        views = None
    handle, path = tempfile.mkstemp(suffix=".safetensors", dir=_scratch)
    try:
        with os.fdopen(handle, "wb") as scratch:
            scratch.write(file)
        try:
            with safe_open(path, framework="np") as opened:
                in_order, metadata = opened.offset_keys(), opened.metadata()
        except (SafetensorError, OSError):  # OSError: an empty file cannot be mapped
            if views is not None:
                raise DisagreementError("safetensors' deserialize reads what its safe_open rejects") from None
            return None
    finally:
        Path(path).unlink()
    if views is None:
        raise DisagreementError("safetensors' safe_open reads what its deserialize rejects")
    return Reading(
        tensors={name: (view["dtype"], tuple(view["shape"]), bytes(view["data"])) for name, view in views.items()},
        order=[name for name in in_order if views[name]["data"]],
        metadata=metadata or {},
    )


def as_reading(header: Header, file: bytes) -> Reading:
    """Bowline's header in the same terms, its data cut out of the file by its offsets."""
    tensors = header.tensors
    return Reading(
        tensors={
            name: (stored.dtype, stored.shape, file[stored.offset : stored.offset + stored.nbytes])
            for name, stored in tensors.items()
        },
        order=[name for name, stored in tensors.items() if stored.nbytes],
        metadata=dict(header.metadata),
    )


class _Object(list[tuple[str, object]]):
    """A JSON object with every one of its pairs, in their order."""

    def get_all(self, key: str) -> list[object]:
        return [value for name, value in self if name == key]


def reasons_to_be_stricter(file: bytes) -> list[str]:
    """Which of `REASONS_TO_BE_STRICTER` hold for a file that safetensors reads."""
    text = file[8 : 8 + int.from_bytes(file[:8], "little")].decode()
    header = json.loads(text, object_pairs_hook=_Object)
    tensors = [(name, info) for name, info in header if name != "__metadata__"]
    metadata = [key for value in header.get_all("__metadata__") for key, _ in value or ()]
    infos = [info for _, info in tensors if isinstance(info, _Object)]
    found = (
        not text.startswith("{"),
        _has_duplicates(name for name, _ in tensors),
        _has_duplicates(metadata),
        len(infos) < len(tensors),
        any({key for key, _ in info} > {"dtype", "shape", "data_offsets"} for info in infos),
        any(isinstance(dtype, _Object) for info in infos for dtype in info.get_all("dtype")),
        any(_overflows_but_for_a_zero(info) for info in infos),
    )
    return [reason for reason, holds in zip(REASONS_TO_BE_STRICTER, found, strict=True) if holds]


def _has_duplicates(names: Iterable[str]) -> bool:
    listed = list(names)
    return len(set(listed)) < len(listed)


def _overflows_but_for_a_zero(info: _Object) -> bool:
    (shape,), (dtype,) = info.get_all("shape"), info.get_all("dtype")
    assert isinstance(shape, list)
    bits = BITS[dtype] if isinstance(dtype, str) else 1
    return 0 in shape and prod(size for size in shape if size) * bits >= 2**64


def compare(file: bytes) -> str:
    """How the two readers stand on a file: "both read it", "both reject it", or the reason to be stricter.

    Raises:
        DisagreementError: in any way that is not one of these, or by an error that breaks the rules for errors.
    """
    theirs = read_by_safetensors(file)
    try:
        header = read_header(MemoryBytes(FILE_NAME, file))
    except FormatError as error:
        check_error(error)
        if theirs is None:
            return "both reject it"
        reasons = reasons_to_be_stricter(file)
        if not reasons:
            raise DisagreementError(f"refused without a known reason: {error}") from error
        return reasons[0]
    if theirs is None:
        raise DisagreementError("Bowline reads what safetensors rejects")
    if as_reading(header, file) != theirs:
        raise DisagreementError("read differently")
    if reasons := reasons_to_be_stricter(file):
        raise DisagreementError(f"not refused in spite of {reasons[0]}")
    return "both read it"


def check_error(error: FormatError) -> None:
    """The rules for errors: the file first, one printable line of bounded length, and a way out."""
    message = error.message
    if not message.startswith(f"{FILE_NAME}: ") or not message.isprintable() or len(message) > 500 or not error.help:
        raise DisagreementError(f"an error that breaks the rules: {str(error)!r}") from error


# ------------------------------------------------------------------------------------------------- random files


class Token(str):
    """JSON that is written as it stands, whether it is JSON or not."""

    __slots__ = ()


_NAMES: tuple[str, ...] = ("a", "b", "A", "wte.weight", "lm_head.weight", "é", "e\u0301", "重み", "😀", "", "\0", "a\0")
_NAMES += ("\x7f", " ", '"', "\\", "/", "\n\t", "\u2028", "\ufeff", "[{", "x" * 70)
_NAMES += ("__metadata__ ", "__METADATA__", "dtype", "shape", "data_offsets")
_SIZES = (0, 1, 1, 2, 2, 3, 4, 5, 8)
_SPACES = ("", "", "", "", "", "", " ", "\n", "\t", "\r", "  ")
_NOT_SPACES = ("\0", "\f", "\v", "\xa0", "\ufeff", ",", "//", "{}", "null", "0")
_NUMBERS = ["-1", "-0", "0.0", "1.0", "1e0", "1E3", "4e-1", "01", "+1", "1.", ".5", "0x4", "1_0", "1e999", "true"]
_NUMBERS += ["NaN", "Infinity", "-Infinity", "null", '"4"', "[]", "{}", "false", "4294967296", "2305843009213693952"]
_NUMBERS += ["9223372036854775808", "18446744073709551615", "18446744073709551616", "-9223372036854775809"]
_NUMBERS += ["9" * digits for digits in (30, 308, 310, 640, 641, 5000)]
_DTYPES = ("f32", "F128", "F8", "", " F32", "F32\0", "bfloat16", "BF16 ", "I128")
_VALUES = ["0", "1.5", "null", "true", '""', '"x"', "[]", "{}", "[[1],{}]", '{"a":1,"a":2}', "NaN", "1e999"]
_VALUES += ['"\\ud800"', '"\\udc00\\ud800"']
_VALUES += ["[" * depth + "]" * depth for depth in (120, 124, 125, 126, 127, 128, 200, 3000)]
_BYTES = [bytes([byte]) for byte in b'{}[]"\\,:0-9 e.\0\n\x1f\x7f\x80\xff']
_BYTES += [b"\xc0\x80", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\xc3\xa9", b"\\u", b"\\ud83d", b"\\ude00"]
_BYTES += [b"null", b"1e1", b'""', b'"a":']


@dataclass
class Draft:
    """A file that is still to be written: its header as pairs that may repeat, its data, and what spoils both."""

    pairs: list[tuple[str, object]]
    data: bytes
    metadata: object = None  # an _Object; None leaves it out
    before: bytes = b""
    after: bytes = b""
    length_off_by: int = 0

    def write(self, random: Random) -> bytes:
        entries = _Object(self.pairs)
        if self.metadata is not None:
            entries.insert(random.randrange(len(entries) + 1), ("__metadata__", self.metadata))
        header = self.before + _json(entries, random).encode("utf-8", "surrogatepass") + self.after
        length = max(len(header) + self.length_off_by, 0)
        return safetensors_file(header, self.data, length=length)


def _json(value: object, random: Random) -> str:
    def space() -> str:
        return random.choice(_SPACES) if spaced else ""

    def write(value: object) -> str:
        if isinstance(value, Token):
            return value
        if isinstance(value, str):
            return _string(value, random)
        if isinstance(value, _Object):
            inside = ",".join(f"{space()}{write(key)}{space()}:{space()}{write(item)}{space()}" for key, item in value)
            return f"{{{inside or space()}}}"
        if isinstance(value, list):
            return f"[{','.join(space() + write(item) + space() for item in value) or space()}]"
        return json.dumps(value)

    spaced = random.random() < 0.2
    return write(value)


def _string(text: str, random: Random) -> str:
    if random.random() < 0.8:
        return json.dumps(text, ensure_ascii=random.random() < 0.5)
    escaped = (f"\\u{ord(letter):04x}" if ord(letter) < 0x10000 else json.dumps(letter)[1:-1] for letter in text)
    return f'"{"".join(escaped)}"'


def draft_of_a_valid_file(random: Random) -> Draft:
    """Tensors of every dtype and small shapes, in any order, with or without metadata, padding and alignment."""
    names = random.sample(_NAMES, random.choice((0, 1, 1, 2, 2, 3, 4, 5)))
    pairs: list[tuple[str, object]] = []
    end = 0
    for name in names:
        dtype = random.choice(list(BITS))
        shape = [random.choice(_SIZES) for _ in range(random.choice((0, 1, 1, 2, 2, 3, 4)))]
        if prod(shape) * BITS[dtype] % 8:
            shape.append(4)
        begin, end = end, end + prod(shape) * BITS[dtype] // 8
        fields = [("dtype", dtype), ("shape", shape), ("data_offsets", [begin, end])]
        random.shuffle(fields)
        pairs.append((name, _Object(fields)))
    random.shuffle(pairs)
    metadata: object = None
    if random.random() < 0.4:
        keys = random.sample(_NAMES, random.choice((0, 1, 2, 3)))
        metadata = _Object((key, random.choice(_NAMES)) for key in keys) if random.random() < 0.9 else Token("null")
    padding = b" " * random.choice((0, 0, 1, 3, 7, 8))
    return Draft(pairs, bytes((7 * i + i // 256) % 256 for i in range(end)), metadata, after=padding)


def valid_file(random: Random) -> bytes:
    """A file that every reader must accept."""
    return draft_of_a_valid_file(random).write(random)


Mutation = Callable[[Draft, Random], None]


def _information(draft: Draft, random: Random) -> _Object:
    """The fields of a random tensor, to be changed in place; nothing that is written where there is none."""
    candidates = [info for _, info in draft.pairs if isinstance(info, _Object)]
    return random.choice(candidates) if candidates else _Object([("dtype", "U8")])


def _change_field(draft: Draft, random: Random, name: str, change: Callable[[object], object]) -> None:
    information = _information(draft, random)
    for index, (key, value) in enumerate(information):
        if key == name:
            information[index] = (key, change(value))


def repeat_a_tensor(draft: Draft, random: Random) -> None:
    if draft.pairs:
        name, info = random.choice(draft.pairs)
        other = random.choice([info, _Object([("dtype", "U8"), ("shape", [0]), ("data_offsets", [0, 0])]), Token("1")])
        draft.pairs.insert(random.randrange(len(draft.pairs) + 1), (name, other))


def repeat_a_field(draft: Draft, random: Random) -> None:
    information = _information(draft, random)
    if information:
        information.append(random.choice(information))


def drop_a_field(draft: Draft, random: Random) -> None:
    information = _information(draft, random)
    if information:
        information.pop(random.randrange(len(information)))


def add_a_field(draft: Draft, random: Random) -> None:
    key = random.choice(("extra", "", "Dtype", "strides", "__metadata__"))
    _information(draft, random).append((key, Token(random.choice(_VALUES))))


def rename_a_field(draft: Draft, random: Random) -> None:
    information = _information(draft, random)
    if information:
        index = random.randrange(len(information))
        information[index] = (random.choice(("dtype", "shape", "data_offsets", "Shape", "")), information[index][1])


def change_the_dtype(draft: Draft, random: Random) -> None:
    def change(dtype: object) -> object:
        names = [random.choice(_DTYPES), random.choice(list(BITS)), str(dtype).lower(), Token(random.choice(_VALUES))]
        as_object = _Object([(str(dtype), Token(random.choice(("null", "null", "0"))))])
        return random.choice([*names, as_object, [dtype]])

    _change_field(draft, random, "dtype", change)


def change_a_number(draft: Draft, random: Random) -> None:
    def change(numbers: object) -> object:
        if not isinstance(numbers, list) or not numbers:
            return [Token(random.choice(_NUMBERS))]
        changed = list(numbers)
        index = random.randrange(len(changed))
        old = changed[index]
        if not isinstance(old, int):
            return changed
        near = [old - 1, old + 1, old * 2, 0]
        same = [f"{old}.0", f"{old}e0", f"{old * 10}E-1", f"0{old}", f"-{old}", f'"{old}"', f"[{old}]"]
        same += [("false", "true")[old]] if old in (0, 1) else []
        other = Token(random.choice(_NUMBERS))
        changed[index] = random.choice([other, random.choice(near), Token(random.choice(same))])
        return changed

    _change_field(draft, random, random.choice(("shape", "data_offsets")), change)


def change_an_array(draft: Draft, random: Random) -> None:
    def change(numbers: object) -> object:
        listed = numbers if isinstance(numbers, list) else []
        choices: list[object] = [[*listed, 1], [*listed, 0], listed[:-1], listed[::-1], [listed], "4"]
        choices += [_Object((str(index), number) for index, number in enumerate(listed)), Token(random.choice(_VALUES))]
        return random.choice(choices)

    _change_field(draft, random, random.choice(("shape", "data_offsets")), change)


def grow_an_empty_shape(draft: Draft, random: Random) -> None:
    wide = [2**31, 2**32, 2**32, 2**60, 2**61, 2**62, 2**63, 2**64 - 1, 1, 3]

    def change(shape: object) -> object:
        sizes: list[object] = [0, *(random.choice(wide) for _ in range(random.choice((1, 2, 2, 3))))]
        random.shuffle(sizes)
        return sizes

    here = random.randrange(len(draft.data) + 1) if random.random() < 0.3 else 0
    fields: list[tuple[str, object]] = [("dtype", random.choice(list(BITS))), ("shape", change([]))]
    draft.pairs.append(("grown", _Object([*fields, ("data_offsets", [here, here])])))


def shift_a_tensor(draft: Draft, random: Random) -> None:
    by = random.choice((-8, -4, -1, 1, 4, 8))

    def change(offsets: object) -> object:
        if not isinstance(offsets, list):
            return offsets
        return [offset + by if isinstance(offset, int) else offset for offset in offsets]

    _change_field(draft, random, "data_offsets", change)


def replace_information(draft: Draft, random: Random) -> None:
    if not draft.pairs:
        return
    index = random.randrange(len(draft.pairs))
    name, info = draft.pairs[index]
    if isinstance(info, _Object) and random.random() < 0.6:
        by_key = dict(info)
        order = ["dtype", "shape", "data_offsets"]
        if random.random() < 0.2:
            random.shuffle(order)
        fields: list[object] = [by_key[key] for key in order if key in by_key]
        draft.pairs[index] = (name, fields)
    else:
        draft.pairs[index] = (name, Token(random.choice(_VALUES)))


def drop_a_tensor(draft: Draft, random: Random) -> None:
    if draft.pairs:
        draft.pairs.pop(random.randrange(len(draft.pairs)))


def rename_a_tensor(draft: Draft, random: Random) -> None:
    if draft.pairs:
        index = random.randrange(len(draft.pairs))
        name = random.choice((*_NAMES, "__metadata__", "\ud800", "\udfff\ud800", "x" * 5000))
        draft.pairs[index] = (name, draft.pairs[index][1])


def change_the_metadata(draft: Draft, random: Random) -> None:
    entries = _Object(draft.metadata) if isinstance(draft.metadata, _Object) else _Object()
    key = random.choice([name for name, _ in entries] or ["format"])
    choice = random.randrange(5)
    if choice == 0:
        draft.metadata = Token(random.choice(_VALUES))
    elif choice == 1:
        draft.pairs.append(("__metadata__", entries))
    else:
        entries += [(key, random.choice(["x", "\ud800", Token(random.choice(_VALUES))])), (key, "y")][: choice - 1]
        draft.metadata = entries


def surround_the_header(draft: Draft, random: Random) -> None:
    around = random.choice((*_SPACES, *_NOT_SPACES)).encode()
    if random.random() < 0.5:
        draft.before += around
    else:
        draft.after += around


def change_the_data(draft: Draft, random: Random) -> None:
    draft.data = random.choice(
        (draft.data[:-1], draft.data + b"\0", b"", draft.data * 2, draft.data[: len(draft.data) // 2])
    )


def misstate_the_length(draft: Draft, random: Random) -> None:
    draft.length_off_by = random.choice((-1, 1, -8, 8, 100_000_000, 2**40, 2**63, -(10**6), random.randrange(-40, 40)))


MUTATIONS: tuple[Mutation, ...] = (
    repeat_a_tensor,
    repeat_a_field,
    drop_a_field,
    add_a_field,
    rename_a_field,
    change_the_dtype,
    change_a_number,
    change_a_number,
    change_an_array,
    grow_an_empty_shape,
    shift_a_tensor,
    replace_information,
    drop_a_tensor,
    rename_a_tensor,
    change_the_metadata,
    surround_the_header,
    change_the_data,
    misstate_the_length,
)


def mutated_file(random: Random) -> bytes:
    """A valid file of which one to three things were changed, each of which a reader may have to notice."""
    draft = draft_of_a_valid_file(random)
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        random.choice(MUTATIONS)(draft, random)
    return draft.write(random)


def mutated_bytes(random: Random) -> bytes:
    """A valid or mutated file of which one to four bytes or runs of bytes were changed, mostly in the header."""
    file = bytearray(valid_file(random) if random.random() < 0.8 else mutated_file(random))
    repair = random.random() < 0.8  # let the length follow, so that more than the length is tested
    stated = int.from_bytes(file[:8], "little")
    header_end = 8 + min(stated, len(file) - 8)
    data_bytes = len(file) - header_end
    for _ in range(random.choice((1, 1, 2, 4))):
        if repair or random.random() < 0.7:
            at = random.randrange(8, max(len(file) - data_bytes, 9))
        else:
            at = random.randrange(len(file) + 1)
        until = at + random.choice((0, 1, 1, 2, 5, 20))
        donor = random.randrange(len(file) + 1)
        with_what = (b"", random.choice(_BYTES), bytes([random.randrange(256)]), bytes(file[donor : donor + 12]))
        file[at:until] = random.choice(with_what)
    if repair and len(file) - 8 >= data_bytes:
        file[:8] = (len(file) - 8 - data_bytes).to_bytes(8, "little")
    return bytes(file)


GENERATORS: dict[str, Callable[[Random], bytes]] = {
    "valid files": valid_file,
    "mutated structures": mutated_file,
    "mutated bytes": mutated_bytes,
}
_SHARES = ("valid files",) * 2 + ("mutated structures",) * 5 + ("mutated bytes",) * 3


# ------------------------------------------------------------------------------------------------- the long run


def main(arguments: list[str] | None = None) -> int:
    """Compare on `--count` files and print what came out; 1 if the readers disagree on any, or Bowline crashes."""
    parser = argparse.ArgumentParser(prog="python -m tests.checkpoint.formats.header_fuzz", description=__doc__)
    parser.add_argument("--count", type=int, default=10_000, help="how many files (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="which files (default: %(default)s)")
    options = parser.parse_args(arguments)

    began = time.monotonic()
    outcomes: Counter[str] = Counter()
    by_generator: Counter[str] = Counter()
    failures = 0
    for index in range(options.count):
        random = Random(f"{options.seed}/{index}")
        kind = random.choice(_SHARES)
        by_generator[kind] += 1
        file = GENERATORS[kind](random)
        try:
            outcomes[compare(file)] += 1
        except Exception as error:
            failures += 1
            print(f"file {index} of seed {options.seed} ({kind}): {type(error).__name__}: {error}\n  {file[:2000]!r}")
    stricter = {reason: outcomes[reason] for reason in REASONS_TO_BE_STRICTER}
    print(f"{options.count} headers, seed {options.seed}, {time.monotonic() - began:.0f} s")
    for kind, count in by_generator.items():
        print(f"  {count:>8} {kind}")
    print(f"{outcomes['both read it']:>8} both read, alike")
    print(f"{outcomes['both reject it']:>8} both reject")
    print(f"{sum(stricter.values()):>8} Bowline alone refuses, for")
    for reason, count in stricter.items():
        print(f"  {count:>8} {reason}")
    print(f"{failures:>8} disagreements or crashes")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
