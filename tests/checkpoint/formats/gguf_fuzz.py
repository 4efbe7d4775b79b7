"""Random GGUF files, well formed and damaged, on which Bowline's header reader is held against that of `gguf`.

    PYTHONPATH=.peers/gguf python -m tests.checkpoint.formats.gguf_fuzz --count 100000

For every file, both read the same, or Bowline refuses it with one printable line, or `gguf` refuses what Bowline reads
and one of `REASONS_TO_BE_WIDER` holds, which is established here from the file. No other exception may come out of
Bowline, and reading a header may take no more than 64 MB above the header itself. Without `gguf` only this is checked.
"""

# ruff: noqa: T201 - a command, which prints

from __future__ import annotations

import argparse
import logging
import os
import struct
import tempfile
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from bowline.checkpoint.formats.gguf.ggml_types import GGML_TYPES, NEWER_THAN_GGUF
from bowline.checkpoint.formats.gguf.header import ArrayAt, GGUFHeader, read_gguf_header
from bowline.checkpoint.formats.gguf.text_arrays import read_token_ids
from bowline.checkpoint.places.byte_source import MemoryBytes
from bowline.errors import FormatError
from tests.checkpoint.gguf_files import KINDS, Stored, Typed, gguf_file, text

FILE_NAME = "fuzz.gguf"
MOST_MEMORY = 64 << 20
REASONS_TO_BE_WIDER = ("a type that gguf does not know", "a tensor of no elements")


class DisagreementError(AssertionError):
    """Bowline and gguf read one file differently, or Bowline breaks a rule."""


# --- what each reader says ------------------------------------------------------------------------------------------

Reading = dict[str, tuple[str, tuple[int, ...], int, int]]
"""By tensor: type, shape with the rows first, place and size of its bytes."""


def read_by_gguf(file: bytes) -> Reading | str | None:
    """What gguf reads; `None` if it refuses the file, and a text if the package is not here."""
    try:
        import gguf
    except ImportError:
        return "gguf is not here"
    logging.disable(logging.CRITICAL)
    handle, path = tempfile.mkstemp(suffix=".gguf", dir=_scratch)
    try:
        with os.fdopen(handle, "wb") as scratch:
            scratch.write(file)
        with np.errstate(all="ignore"):
            reader: Any = gguf.GGUFReader(path)
        return {
            tensor.name: (
                tensor.tensor_type.name,
                tuple(int(size) for size in tensor.shape[::-1]),
                int(tensor.data_offset),
                int(tensor.n_bytes),
            )
            for tensor in reader.tensors
        }
    except (Exception, RecursionError):  # it refuses by whatever its arrays raise
        return None
    finally:
        logging.disable(logging.NOTSET)
        Path(path).unlink()


_scratch = Path("/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir())


def as_reading(header: GGUFHeader) -> Reading:
    """Bowline's header in the same terms."""
    return {name: (one.dtype, one.shape, one.offset, one.nbytes) for name, one in header.tensors.items()}


def reasons_to_be_wider(header: GGUFHeader) -> list[str]:
    """Which of `REASONS_TO_BE_WIDER` hold for a file that Bowline reads."""
    tensors = header.tensors.values()
    found = (any(one.dtype in NEWER_THAN_GGUF for one in tensors), any(0 in one.shape for one in tensors))
    return [reason for reason, holds in zip(REASONS_TO_BE_WIDER, found, strict=True) if holds]


def compare(file: bytes) -> str:
    """How the two readers stand on a file.

    Raises `DisagreementError` if Bowline reads what gguf refuses without a reason, reads it differently, or breaks the
    rules for errors.
    """
    try:
        header = read_gguf_header(MemoryBytes(FILE_NAME, file))
        for value in header.values.values():
            if isinstance(value, ArrayAt) and value.kind == "STRING":
                read_token_ids(MemoryBytes(FILE_NAME, file), value).last  # noqa: B018 - decodes all of them
    except FormatError as error:
        message = error.message
        if (
            not message.startswith(f"{FILE_NAME}: ")
            or not message.isprintable()
            or len(message) > 500
            or not error.help
        ):
            raise DisagreementError(f"an error that breaks the rules: {str(error)!r}") from error
        return "refused by Bowline"  # gguf is not asked: it loops through arrays of 2^63 elements
    theirs = read_by_gguf(file)
    if isinstance(theirs, str):
        return theirs
    if theirs is None:
        reasons = reasons_to_be_wider(header)
        if not reasons:
            raise DisagreementError("Bowline reads what gguf refuses")
        return reasons[0]
    if as_reading(header) != theirs:
        raise DisagreementError(f"read differently: {as_reading(header)} and {theirs}")
    return "both read it"


# --- random files ---------------------------------------------------------------------------------------------------

_NUMBERS = (0, 1, 2, 3, 4, 7, 8, 9, 12, 13, 31, 32, 33, 39, 255, 256, 65535, 1 << 31, (1 << 32) - 1)
_WIDE = (*_NUMBERS, 1 << 32, 1 << 40, 1 << 61, (1 << 63) - 1, 1 << 63, (1 << 64) - 8, (1 << 64) - 1)
_KEYS = ("general.architecture", "general.alignment", "a", "é", "x" * 70, "tokenizer.ggml.tokens", "split.count")


def valid_file(random: Random) -> bytes:
    """A file that every reader must accept."""
    alignment = random.choice((32, 32, 32, 8, 1, 64))
    values: dict[str, Any] = {"general.architecture": random.choice(("llama", "gemma3", "新"))}
    if alignment != 32 or random.random() < 0.2:
        values["general.alignment"] = alignment
    for number in range(random.choice((0, 1, 2, 5))):
        values[f"key.{number}"] = random.choice(
            (
                1,
                2.5,
                True,
                "text",
                "y" * random.choice((0, 1024, 1025, 3000)),
                [str(at) * (at % 5) or "" for at in range(random.choice((1, 3, 50)))],
                [1, 2, 3],
                Typed(random.choice((0, 1)), b"\x07"),
                Typed(12, struct.pack("<d", float("nan"))),
                Typed(9, struct.pack("<IQ", random.choice((0, 8, 12)), 0)),
            )
        )
    tensors: dict[str, Any] = {}
    for name in random.sample(("token_embd.weight", "output.weight", "b", "ü", "z" * 63), random.choice((0, 1, 2, 3))):
        kind = KINDS[random.choice([name for name in KINDS if name not in NEWER_THAN_GGUF])]
        rows = random.choice(((), (1,), (2,), (3, 2)))
        shape = (*rows, kind.elements * random.choice((1, 2)))
        nbytes = int(np.prod(shape)) // kind.elements * kind.nbytes
        tensors[name] = Stored(kind.name, shape, random.randbytes(nbytes))
    return gguf_file(tensors, values, version=random.choice((2, 3, 3)), alignment=alignment)


def cut(file: bytearray, random: Random) -> None:
    del file[random.randrange(len(file) + 1) :]


def flip_a_bit(file: bytearray, random: Random) -> None:
    if file:
        file[random.randrange(len(file))] ^= 1 << random.randrange(8)


def overwrite_a_number(file: bytearray, random: Random) -> None:
    at = random.randrange(4, max(5, len(file)))
    wide = random.random() < 0.6
    raw = struct.pack("<Q", random.choice(_WIDE)) if wide else struct.pack("<I", random.choice(_NUMBERS))
    file[at : at + len(raw)] = raw


def overwrite_a_count(file: bytearray, random: Random) -> None:
    at = random.choice((8, 16))
    file[at : at + 8] = struct.pack("<Q", random.choice(_WIDE))


def change_the_version(file: bytearray, random: Random) -> None:
    file[4:8] = struct.pack("<I", random.choice((0, 1, 2, 3, 4, 2 << 24, 3 << 24, 3 << 16)))


def insert_bytes(file: bytearray, random: Random) -> None:
    at = random.randrange(len(file) + 1)
    file[at:at] = random.choice((random.randbytes(random.randrange(1, 9)), bytes(8), b"\xff" * 8))


def remove_bytes(file: bytearray, random: Random) -> None:
    at = random.randrange(len(file) + 1)
    del file[at : at + random.choice((1, 4, 8, 12))]


def repeat_bytes(file: bytearray, random: Random) -> None:
    at, length = random.randrange(len(file) + 1), random.choice((8, 16, 40, 100))
    file[at:at] = file[at : at + length]


def add_a_key(file: bytearray, random: Random) -> None:
    """A key more, with a value that is often none."""
    (count,) = struct.unpack_from("<Q", file.ljust(24, b"\0"), 16)
    nested = struct.pack("<IIQ", 9, 9, random.choice(_WIDE)) + struct.pack("<IQ", 8, random.choice(_WIDE))
    texts = (
        struct.pack("<IIQ", 9, 8, random.choice((1, 2, *_WIDE))) + text("a") + struct.pack("<Q", random.choice(_WIDE))
    )
    number = struct.pack("<II", random.choice(_NUMBERS), random.choice(_NUMBERS))
    value = random.choice((nested, texts, number, struct.pack("<IQ", 8, random.choice(_WIDE))))
    file[24:24] = text(random.choice(_KEYS)) + value
    file[16:24] = struct.pack("<Q", (count + 1) % (1 << 64))


def change_a_tensor(file: bytearray, random: Random) -> None:
    """A number in the entry of the embedding: axes, sizes, type or offset."""
    at = file.find(b"token_embd.weight")
    if at >= 0:
        at += 17 + random.choice((0, 4, 8, 12, 16, 20, 24, 28, 32))
        number = random.choice((random.choice(list(GGML_TYPES)), random.choice(_NUMBERS)))
        raw = struct.pack("<I", number) if random.random() < 0.7 else struct.pack("<Q", random.choice(_WIDE))
        file[at : at + len(raw)] = raw


MUTATIONS: tuple[Callable[[bytearray, Random], None], ...] = (
    cut,
    flip_a_bit,
    overwrite_a_number,
    overwrite_a_count,
    change_the_version,
    insert_bytes,
    remove_bytes,
    repeat_bytes,
    add_a_key,
    change_a_tensor,
)


def random_file(random: Random) -> bytes:
    """A valid file, damaged up to three times; one in ten is left as it is."""
    file = bytearray(valid_file(random))
    for _ in range(random.choice((0, 1, 1, 1, 1, 1, 1, 2, 2, 3))):
        random.choice(MUTATIONS)(file, random)
    return bytes(file)


def run(count: int, seed: int = 0) -> Counter[str]:
    """Compare both readers on `count` files, and the memory of every hundredth; an error names the file."""
    stands: Counter[str] = Counter()
    for number in range(count):
        file = random_file(Random(f"{seed}.{number}"))
        try:
            stands[compare(file)] += 1
            if number % 100 == 0:
                _check_memory(file)
        except Exception as error:
            raise DisagreementError(f"file {number} of seed {seed}: {type(error).__name__}: {error}") from error
    return stands


def _check_memory(file: bytes) -> None:
    tracemalloc.start()
    try:
        read_gguf_header(MemoryBytes(FILE_NAME, file))
    except FormatError:
        pass
    finally:
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    if most > MOST_MEMORY + len(file):
        raise DisagreementError(f"{most} bytes of memory for a file of {len(file)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    begin = time.monotonic()
    for stand, number in run(options.count, options.seed).most_common():
        print(f"{number:9,}  {stand}")
    print(f"{options.count:9,}  files in {time.monotonic() - begin:.0f} s, seed {options.seed}")


if __name__ == "__main__":
    main()
