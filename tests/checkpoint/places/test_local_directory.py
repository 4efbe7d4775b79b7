"""A directory opens the files inside it, and refuses names and links that lead out of it."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from bowline.checkpoint.places.file_set import SMALL_FILE_LIMIT
from bowline.checkpoint.places.local_directory import LocalDirectory
from bowline.errors import CheckpointError, FormatError, NoCheckpointError


def test_sizes_are_of_regular_files_and_what_links_to_them(tmp_path: Path) -> None:
    (tmp_path / "b").write_bytes(b"12345")
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "fifo")
    assert dict(LocalDirectory(tmp_path).sizes()) == {"a": 5, "b": 5}


def test_a_broken_link_is_listed_so_that_opening_it_can_say_why(tmp_path: Path) -> None:
    (tmp_path / "gone").symlink_to("nowhere")
    directory = LocalDirectory(tmp_path)
    assert dict(directory.sizes()) == {"gone": 0}
    with pytest.raises(CheckpointError, match="gone: cannot be read: No such file"):
        directory.open("gone")


def test_a_file_that_loops_is_an_error_when_it_is_opened(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(CheckpointError, match="cannot be read: Too many levels of symbolic links"):
        LocalDirectory(tmp_path).open("a")


def test_a_directory_that_loops_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(CheckpointError, match=r"a: cannot be listed: .*symbolic links"):
        LocalDirectory(tmp_path / "a")


def test_a_link_to_the_directory_above_does_not_loop_the_listing(tmp_path: Path) -> None:
    (tmp_path / "self").symlink_to(tmp_path)
    assert dict(LocalDirectory(tmp_path).sizes()) == {}


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(NoCheckpointError, match="no such directory"):
        LocalDirectory(tmp_path / "gone")


def test_a_file_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="cannot be listed: Not a directory"):
        LocalDirectory(tmp_path / "file")


def test_a_directory_that_may_not_be_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(CheckpointError, match="cannot be listed: Permission denied") as caught:
        LocalDirectory(tmp_path)
    assert caught.value.help


def test_a_directory_reached_through_a_link_is_its_own_root(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "file").write_bytes(b"x")
    (tmp_path / "link").symlink_to("real")
    assert LocalDirectory(tmp_path / "link").read("file") == b"x"


@pytest.mark.parametrize(
    ("name", "phrase"),
    [
        ("/etc/passwd", "is an absolute path"),
        ("../file", "leaves the directory"),
        ("a/../../file", "leaves the directory"),
        ("a/..", "leaves the directory"),
        ("", "is not a file name"),
        (".", "is not a file name"),
        ("a\0b", "is not a file name"),
        ("a\\..\\b", "is not a file name"),
        ("out", "is a link that leads out"),
        ("folder/file", "is a link that leads out"),
    ],
)
def test_ways_out_are_named_and_refused(tmp_path: Path, name: str, phrase: str) -> None:
    root = tmp_path / "model"
    (root / "inner").mkdir(parents=True)
    (tmp_path / "file").write_bytes(b"secret")
    (root / "out").symlink_to(tmp_path / "file")
    (root / "folder").symlink_to(tmp_path)
    directory = LocalDirectory(root)
    way_out = directory.way_out(name)
    assert way_out is not None
    assert way_out.startswith(phrase)
    assert not directory.has(name) or name in directory.sizes()
    with pytest.raises(CheckpointError, match="expected a file inside the checkpoint"):
        directory.open(name)


def test_a_sibling_whose_name_begins_alike_is_outside(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model-2").mkdir()
    (tmp_path / "model-2" / "file").touch()
    (tmp_path / "model" / "file").symlink_to("../model-2/file")
    assert LocalDirectory(tmp_path / "model").way_out("file")


def cache(
    tmp_path: Path, repository: str = "models--org--name", snapshots: str = "snapshots", folder: str = ""
) -> Path:
    snapshot = tmp_path / repository / snapshots / "0a1b2c" / folder
    snapshot.mkdir(parents=True)
    blob = tmp_path / repository / "blobs" / "ffff"
    blob.parent.mkdir()
    blob.write_bytes(b"blob")
    (snapshot / "file").symlink_to(os.path.relpath(blob, snapshot))
    return snapshot


def test_a_snapshot_of_the_hubs_cache_may_link_to_its_blobs(tmp_path: Path) -> None:
    assert LocalDirectory(cache(tmp_path)).read("file") == b"blob"


def test_a_folder_of_a_snapshot_may_link_to_its_blobs(tmp_path: Path) -> None:
    assert LocalDirectory(cache(tmp_path, folder="text_encoder")).read("file") == b"blob"


@pytest.mark.parametrize(("repository", "snapshots"), [("org--name", "snapshots"), ("models--org--name", "shots")])
def test_a_layout_that_only_resembles_the_cache_may_not(tmp_path: Path, repository: str, snapshots: str) -> None:
    assert LocalDirectory(cache(tmp_path, repository, snapshots)).way_out("file")


def test_a_snapshot_may_not_link_to_the_blobs_of_another_repository(tmp_path: Path) -> None:
    snapshot = cache(tmp_path)
    other = tmp_path / "models--org--other" / "blobs" / "ffff"
    other.parent.mkdir(parents=True)
    other.touch()
    (snapshot / "foreign").symlink_to(other)
    assert LocalDirectory(snapshot).way_out("foreign")


def test_a_file_in_a_folder_is_there_although_it_is_not_listed(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_bytes(b"x")
    directory = LocalDirectory(tmp_path)
    assert (dict(directory.sizes()), directory.has("folder/file"), directory.read("folder/file")) == ({}, True, b"x")


def test_a_name_too_long_for_any_file_is_not_there(tmp_path: Path) -> None:
    assert not LocalDirectory(tmp_path).has("x" * 5000)


def test_a_small_file_that_is_huge_is_refused_before_it_is_read(tmp_path: Path) -> None:
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(SMALL_FILE_LIMIT + 1)
    with pytest.raises(FormatError, match="expected at most 268435456"):
        LocalDirectory(tmp_path).read("config.json")
