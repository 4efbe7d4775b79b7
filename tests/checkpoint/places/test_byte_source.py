"""Reads give exact ranges or an error, whatever the disk does."""

from __future__ import annotations

import errno
import os
import warnings
from pathlib import Path

import pytest

from bowline.checkpoint.places.byte_source import LocalFile, MemoryBytes
from bowline.errors import CheckpointError, FormatError

CONTENT = bytes(range(256)) * 4
PREADV = os.preadv


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "file").write_bytes(CONTENT)
    return tmp_path / "file"


def test_a_range_is_given_exactly(path: Path) -> None:
    for source in (LocalFile(path), MemoryBytes("file", CONTENT)):
        with source:
            assert source.read_at(250, 10) == CONTENT[250:260]
            assert source.read_at(1024, 0) == b""
            assert source.read_at(0, 1024) == CONTENT


@pytest.mark.parametrize(("offset", "length"), [(-1, 1), (0, 1025), (1024, 1), (2000, 0), (0, -1), (0, 1 << 62)])
def test_a_range_beyond_the_file_is_refused_before_memory_is_taken(path: Path, offset: int, length: int) -> None:
    for source in (LocalFile(path), MemoryBytes("file", CONTENT)):
        with source, pytest.raises(FormatError, match=r"file: bytes .* were requested, but the file has 1024"):
            source.read_at(offset, length)


@pytest.mark.parametrize("most", [1, 3, 7])
def test_a_disk_that_returns_short_reads_gives_the_right_bytes(
    path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: PREADV(fd, [buffers[0][:most]], at))
    with LocalFile(path) as source:
        assert source.read_at(5, 1000) == CONTENT[5:1005]


def test_a_file_cut_short_after_it_was_opened_is_an_error(path: Path) -> None:
    with LocalFile(path) as source:
        os.truncate(path, 100)
        with pytest.raises(FormatError, match="the file ended at byte 100 while it was read; it had 1024 bytes"):
            source.read_at(50, 100)


def test_a_disk_that_fails_is_an_error_with_the_systems_reason(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with LocalFile(path) as source:
        monkeypatch.setattr(os, "preadv", fail)
        with pytest.raises(CheckpointError, match="cannot be read: Input/output error") as caught:
            source.read_at(0, 1)
        assert caught.value.help


def test_a_file_without_permission_is_an_error(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(CheckpointError, match="cannot be read: Permission denied"):
        LocalFile(path)


def test_a_fifo_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(CheckpointError, match="not a regular file"):
        LocalFile(tmp_path / "fifo")


@pytest.mark.parametrize("odd", ["/dev/zero", "/", "/dev/null"])
def test_a_device_and_a_directory_are_not_files(odd: str) -> None:
    with pytest.raises(CheckpointError, match="not a regular file"):
        LocalFile(odd)


def test_closing_twice_is_no_error_and_nothing_stays_open(path: Path) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(20):
            source = LocalFile(path)
            source.close()
            source.close()
        LocalFile(path)  # let go of without closing
    assert len(list(Path("/proc/self/fd").iterdir())) == before
