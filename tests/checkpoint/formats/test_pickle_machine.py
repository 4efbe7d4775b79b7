"""A pickle is never executed, and its claims about itself are not trusted."""

from __future__ import annotations

import os
import pickle
import pickletools
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bowline.checkpoint.formats import pickle_machine
from bowline.checkpoint.formats.pickle_file import PickledFile
from bowline.errors import FormatError, UnsafePickleError
from tests.checkpoint.pickled import (
    FALSE,
    HOOKS,
    NONE,
    PROGRAM,
    SIX,
    WATCH,
    archive,
    assert_sound,
    call,
    dictionary,
    name,
    number,
    patched,
    read,
    read_watched,
    saved,
    storage,
    tensor,
    text,
    together,
)

# --- nothing is executed ----------------------------------------------------------------------------------------------


def test_the_watch_sees_a_pickle_that_runs(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    WATCH.events.clear()
    WATCH.on = True
    pickle.loads(b"cbuiltins\nopen\n" + together(text(str(canary)), text("w")) + b"R.").close()
    WATCH.on = False
    assert canary.exists()
    assert WATCH.events[0].startswith("pickle.find_class")
    assert any(event.startswith("open") for event in WATCH.events)


COMMAND = text("echo run > canary")
STACK_GLOBAL = b"\x93"

HOSTILE: Mapping[str, tuple[bytes, str]] = {
    "GLOBAL": (call("os", "system", COMMAND), "'os.system'"),
    "GLOBAL, Python 2's name": (call("__builtin__", "eval", text("1")), "'__builtin__.eval'"),
    "STACK_GLOBAL": (text("posix") + text("system") + STACK_GLOBAL + COMMAND + b"\x85R", "'posix.system'"),
    "STACK_GLOBAL with a dotted name": (
        text("torch") + text("serialization.os.system") + STACK_GLOBAL + COMMAND + b"\x85R",
        "'torch.serialization.os.system'",
    ),
    "INST": (b"(" + COMMAND + b"ios\nsystem\n", "'os.system' (opcode INST)"),
    "INST of an allowed class": (b"(icollections\nOrderedDict\n", "'collections.OrderedDict' (opcode INST)"),
    "OBJ": (b"(" + name("os", "system") + COMMAND + b"o", "'os.system'"),
    "OBJ of an allowed class": (b"(" + name("torch", "Size") + b"o", "'torch.Size' (opcode OBJ)"),
    "OBJ of nothing": (b"(o", "nothing (opcode OBJ)"),
    "NEWOBJ": (name("subprocess", "Popen") + COMMAND + b"\x85\x81", "'subprocess.Popen'"),
    "NEWOBJ of an allowed class": (name("torch", "Size") + b")\x81", "'torch.Size' (opcode NEWOBJ)"),
    "NEWOBJ_EX": (name("collections", "OrderedDict") + b")}\x92", "'collections.OrderedDict' (opcode NEWOBJ_EX)"),
    "EXT1": (b"\x82\x01)R", "extension 1 (opcode EXT1)"),
    "EXT2": (b"\x83\x01\x02)R", "extension 513 (opcode EXT2)"),
    "EXT4": (b"\x84\x01\x00\x00\x00)R", "extension 1 (opcode EXT4)"),
    "REDUCE of a storage class": (name("torch", "FloatStorage") + b")R", "to call 'torch.FloatStorage'"),
    "REDUCE of a dtype": (name("torch", "float16") + b")R", "to call 'torch.float16'"),
    "REDUCE of text": (text("os.system") + COMMAND + b"\x85R", "to call the text 'os.system'"),
    "REDUCE of a tensor": (tensor() + b")R", "to call a tensor"),
    "BUILD of a tensor, which would call set_": (tensor() + b")b", "to set the state of a tensor"),
    "BUILD of an allowed function": (
        name("torch._utils", "_rebuild_tensor_v2") + dictionary({"__code__": NONE}) + b"b",
        "to set the state of 'torch._utils._rebuild_tensor_v2'",
    ),
    "BUILD of a class, for its __setstate__": (
        name("collections", "OrderedDict") + dictionary({"__setstate__": NONE}) + b"b",
        "to set the state of 'collections.OrderedDict'",
    ),
    "BUILD of a dictionary": (b"}}b", "to set the state of a dictionary of 0"),
    "BUILD with slots": (HOOKS + together(NONE, dictionary({"__class__": NONE})) + b"b", "to a tuple of 2"),
    "APPEND, which would call append": (HOOKS + NONE + b"a", "to append to a dictionary"),
    "SETITEM, which would call __setitem__": (tensor() + NONE + NONE + b"s", "to set items of a tensor"),
    "getattr": (call("builtins", "getattr", name("torch", "Size"), text("mro")), "'builtins.getattr'"),
    "operator": (call("operator", "methodcaller", text("system")), "'operator.methodcaller'"),
    "apply": (call("functools", "partial", name("torch", "Size")), "'functools.partial'"),
    "a loader in the loader": (
        call("torch.storage", "_load_from_bytes", text("x")),
        "'torch.storage._load_from_bytes'",
    ),
    "torch.load": (call("torch", "load", text("x")), "'torch.load'"),
    "a name with a space": (name("torch Size", ""), "'torch.Size '"),
    "an allowed name split elsewhere": (text("torch") + text("_utils._rebuild_tensor_v2") + STACK_GLOBAL, "_v2'"),
    "numpy": (call("numpy.core.multiarray", "_reconstruct", NONE), "'numpy.core.multiarray._reconstruct'"),
    "the lines of a module's name escaped": (b"cos\x1b[31m\nsystem\n", r"'os\x1b[31m.system'"),
    "PERSID": (b"Pstorage\n", "the opcode PERSID"),
    "DUP": (b"}2", "the opcode DUP"),
    "POP": (b"}}0", "the opcode POP"),
    "GET": (b"g0\n", "the opcode GET"),
    "a set": (b"\x8f", "the opcode EMPTY_SET"),
    "a buffer outside of the file": (b"\x97", "the opcode NEXT_BUFFER"),
    "a bytearray": (b"\x96" + struct.pack("<Q", 1) + b"x", "the opcode BYTEARRAY8"),
}


@pytest.mark.parametrize("hidden", [False, True], ids=["bare", "behind a tensor"])
@pytest.mark.parametrize("what", HOSTILE)
def test_what_a_pickle_asks_for_beyond_tensors_is_refused_by_name(what: str, hidden: bool) -> None:
    value, asked = HOSTILE[what]
    error = read_watched(saved(dictionary({"weight": tensor(), "x": value} if hidden else {"x": value})))
    assert isinstance(error, UnsafePickleError)
    assert "pytorch_model.bin: the pickle asks " in error.message
    assert asked in error.message
    assert error.message.endswith(", expected only tensors")
    assert "get the weights as safetensors" in str(error.help)
    assert "weights_only=True) reads it" not in str(error.help)  # torch refuses most of these as well


def test_state_set_on_an_ordered_dict_changes_nothing() -> None:
    injected = dictionary(dict.fromkeys(("items", "__class__", "__setstate__", "__reduce__", "keys"), NONE))
    found = read_watched(saved(HOOKS + b"(" + text("weight") + tensor() + b"u" + injected + b"b"))
    assert isinstance(found, PickledFile)
    assert list(found.tensors) == ["weight"]


@pytest.mark.parametrize("protocol", range(6))
def test_the_pickles_of_python_objects_do_not_run(protocol: int, tmp_path: Path) -> None:
    class Payload:
        def __reduce__(self) -> tuple[Callable[..., object], tuple[str, ...]]:
            return os.mkdir, (str(tmp_path / "canary"),)

    payload = pickle.dumps({"weight": Payload()}, protocol)
    assert isinstance(read_watched(archive({"data.pkl": payload})), UnsafePickleError)
    assert not (tmp_path / "canary").exists()
    pickle.loads(payload)  # it is a live one
    assert (tmp_path / "canary").exists()


# --- what is malformed ------------------------------------------------------------------------------------------------

MALFORMED: Mapping[str, tuple[bytes, str]] = {
    "text for a storage": (text("0") + b"Q", "the text '0' in place of a storage"),
    "a number for a storage": (number(0) + b"Q", "the number 0 in place of a storage"),
    "a list for a storage": (
        b"](" + text("storage") + name("torch", "FloatStorage") + text("0") + text("cpu") + number(6) + b"eQ",
        "a list of 5 in place of a storage",
    ),
    "another kind of persistent thing": (
        together(text("module"), name("torch", "FloatStorage"), text("0"), text("cpu"), number(6)) + b"Q",
        "in place of a storage",
    ),
    "a function for a storage class": (storage(kind="Size"), "in place of a storage"),
    "a negative storage": (storage(numel=-1), "in place of a storage"),
    "a storage beyond an int64": (storage(numel=1 << 63), "in place of a storage"),
    "a storage's key that is a path": (storage("../../etc/passwd"), "a storage called '../../etc/passwd'"),
    "a storage's key that is no plain number": (storage("٣"), "a storage called"),
    "a storage's key without end": (storage("1" * 1000), "a storage called"),
    "one storage with two types": (
        together(storage(), storage(kind="IntStorage")),
        "storage 0 has two types or sizes",
    ),
    "one storage with two sizes": (together(storage(), storage(numel=5)), "storage 0 has two types or sizes"),
    "a tensor of no storage": (tensor(of=number(0)), "with arguments that it does not take"),
    "a tensor of too few arguments": (
        call("torch._utils", "_rebuild_tensor_v2", storage()),
        "does not take: a tuple of 1",
    ),
    "arguments that are no tuple": (name("collections", "OrderedDict") + b"]R", "expected a tuple"),
    "an OrderedDict of arguments": (call("collections", "OrderedDict", b"]"), "does not take"),
    "a Size of text": (call("torch", "Size", together(text("2"))), "does not take"),
    "a Size of a truth value": (call("torch", "Size", together(b"\x88")), "does not take"),
    "a parameter of no tensor": (call("torch._utils", "_rebuild_parameter", NONE, FALSE, HOOKS), "does not take"),
    "a negative offset": (tensor(offset=-1), "offset, shape and strides"),
    "a negative stride": (tensor(strides=(-3, 1)), "offset, shape and strides"),
    "a negative shape": (tensor((-2, -3)), "offset, shape and strides"),
    "a shape beyond an int64": (tensor((1 << 63, 0)), "offset, shape and strides"),
    "more strides than axes": (tensor(strides=(1, 1, 1)), "offset, shape and strides"),
    "65 axes": (tensor((1,) * 65, (1,) * 65), "offset, shape and strides"),
    "a number of a thousand bits": (number(1 << 1000), "a number of 1001 bits"),
    "a dictionary with a tuple as key": (b"})Ns", "a dictionary with a tuple of 0 as key"),
    "a dictionary with a large number as key": (b"}" + number((1 << 61) - 1) + b"Ns", "as key, expected text"),
    "a key twice": (b"}(" + text("w") + NONE + text("w") + tensor() + b"u", "the key 'w' occurs twice"),
    "a key without its value": (b"}(" + text("w") + b"u", "a key without its value"),
    "a memo that was not put": (b"h\x07", "memo 7 is read, but was never set"),
    "a value that is not there": (b"\x85", "finds no value on the stack"),
    "a mark that is not there": (b"t", "finds no mark on the stack"),
    "the values under a mark": (b"}(\x85", "finds no value on the stack"),
    "two values": (b"}}", "2 values and 0 marks at its end"),
    "an open mark": (b"}(N", "1 values and 1 marks at its end"),
    "bytes after the end": (b"}.}", "bytes after its end"),
    "no name": (NONE + NONE + STACK_GLOBAL, "a name made of None and None"),
    "a protocol to come": (b"\x80\x09}", "protocol 9"),
    "an unknown opcode": (b"\xff", "opcode"),
    "bytes that are not UTF-8": (b"X\x01\x00\x00\x00\xff", "opcode"),
    "text longer than the file": (b"X\xff\xff\xff\xff", "opcode"),
    "bytes of 2^62": (b"\x8e" + struct.pack("<Q", 1 << 62), "opcode"),
    "bytes of 2^64 - 1": (b"\x8e" + b"\xff" * 8, "opcode"),
    "text of 2^62": (b"\x8d" + struct.pack("<Q", 1 << 62), "opcode"),
    "a number of 2^31 bytes": (b"\x8b\xff\xff\xff\x7f", "opcode"),
    "a number of negative length": (b"\x8b\xff\xff\xff\xff", "opcode"),
    "a frame of 2^64 - 1": (b"\x95" + b"\xff" * 8 + b"}", "a frame of 18446744073709551615 bytes"),
    "a name with an escape, which only the disassembler resolves": (b"ctorch\nS\\x69ze\n", "a backslash in a name"),
    "text of Python 2 in another encoding": (b"U\x01\xe9", "expected ASCII"),
    "a number in a line of two thousand digits": (b"L" + b"9" * 2000 + b"L\n", "no newline found"),
    "a number in a line of a million digits": (b"L" + b"9" * 1_000_000 + b"L\n", "opcode"),
    "more marks than a state dictionary has": (b"(" * 1000, "more than 128 open marks"),
}


@pytest.mark.parametrize("what", MALFORMED)
def test_a_malformed_pickle_is_refused_with_what_was_seen(what: str) -> None:
    value, seen = MALFORMED[what]
    error = read_watched(saved(value))
    assert isinstance(error, FormatError)
    assert error.message.startswith("pytorch_model.bin: the pickle is malformed: ")
    assert seen in error.message
    assert len(error.message) < 500
    assert error.message.isprintable()


@pytest.mark.parametrize("length", range(0, 300, 7))
def test_a_pickle_cut_short_is_refused(length: int) -> None:
    whole = b"\x80\x02" + dictionary({"w": tensor()}) + b"."
    assert len(whole) < 300
    if length < len(whole):
        with pytest.raises(FormatError, match="the pickle is malformed"):
            read(archive({"data.pkl": whole[:length], "data/0": SIX}))


# --- limits ----------------------------------------------------------------------------------------------------------


def test_a_lying_length_takes_no_memory() -> None:
    files = [saved(value) for value, _ in MALFORMED.values()]
    tracemalloc.start()
    for file in files:
        with pytest.raises(FormatError):
            read(file)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 32 << 20


BOMBS = {
    "nothings": b"N",
    "dictionaries": b"}",
    "a memo without end": b"N\x94",
    "tuples in tuples": b"\x85",
    "dictionaries of one item": b"}K\x01K\x01s",
    "short wide texts": text("\N{GRINNING FACE}abcd"),
}


@pytest.mark.parametrize("what", BOMBS)
def test_a_pickle_of_too_many_opcodes_is_refused(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pickle_machine, "MOST_OPCODES", 50_000)
    with pytest.raises(FormatError, match="more than 50000 opcodes"):
        read(saved(b"]" + BOMBS[what] * 60_000))


def test_a_pickle_that_is_too_large_is_refused_unread() -> None:
    size = pickle_machine.LARGEST_PICKLE + 1
    file = archive({"data.pkl": bytes(size)})
    with pytest.raises(FormatError, match=f"has {size} bytes, expected at most {pickle_machine.LARGEST_PICKLE}"):
        read(file)


def test_the_worst_pickle_within_the_limits_fits_a_small_machine(tmp_path: Path) -> None:
    script = (
        "import resource, sys\n"
        "from bowline.checkpoint.formats.pickle_machine import LARGEST_PICKLE, MOST_OPCODES, run_pickle\n"
        "from bowline.errors import FormatError\n"
        "bomb = b'}' * (MOST_OPCODES + 1)\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + (512 << 20),) * 2)\n"
        "try:\n"
        "    run_pickle(bomb, 'data.pkl')\n"
        "except FormatError as error:\n"
        "    sys.exit('more than' not in error.message)\n"
    )
    if not Path("/proc/self/statm").exists():
        pytest.skip("needs Linux's /proc")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", script], check=True, env=environment, timeout=60)


def test_values_within_values_without_end_are_no_recursion() -> None:
    deep = dictionary({"w": tensor(), "deep": b")" + b"\x85" * 200_000})
    assert read(saved(deep)).notes == ("'deep' is left out: a tuple of 1, not a tensor",)


def test_a_dictionary_within_itself_is_no_recursion() -> None:
    loop = b"}q\x00(" + text("w") + tensor() + text("self") + b"h\x00u"
    assert read(saved(loop)).notes == ("'self' is left out: a dictionary of 2, not a tensor",)


def test_a_billion_laughs_take_no_more_memory_than_their_bytes() -> None:
    laughs = b"]q\x00"
    for level in range(60):  # each list holds the one before it twice
        laughs += b"](" + b"h" + bytes([level]) + b"h" + bytes([level]) + b"eq" + bytes([level + 1])
    found = read(saved(dictionary({"w": tensor(), "laughs": together(laughs)})))
    assert found.notes == ("'laughs' is left out: a tuple of 61, not a tensor",)


# --- whatever the bytes -----------------------------------------------------------------------------------------------

OPCODES = [ord(opcode.code) for opcode in pickletools.opcodes]

patches = st.lists(
    st.tuples(
        st.integers(0, len(PROGRAM) - 1),
        st.integers(0, 6),
        st.one_of(
            st.binary(max_size=9),
            st.sampled_from(OPCODES).map(lambda code: bytes([code])),
            st.sampled_from([value for value, _ in (*HOSTILE.values(), *MALFORMED.values()) if len(value) < 2000]),
        ),
    ),
    min_size=1,
    max_size=4,
)


@given(changes=patches)
@settings(max_examples=400)
def test_any_change_of_a_pickle_is_read_or_refused_and_nothing_runs(changes: list[tuple[int, int, bytes]]) -> None:
    file = archive({"data.pkl": patched(PROGRAM, changes), "byteorder": b"little", "data/0": SIX})
    assert_sound(read_watched(file), len(file))


@given(data=st.binary(max_size=200))
@settings(max_examples=200)
def test_any_bytes_in_place_of_the_pickle_are_read_or_refused(data: bytes) -> None:
    file = archive({"data.pkl": data})
    assert_sound(read_watched(file), len(file))
