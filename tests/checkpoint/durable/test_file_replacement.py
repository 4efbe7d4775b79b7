"""A small file is replaced atomically, and the old bytes are kept."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest

from bowline.checkpoint.durable.file_replacement import replace_file
from bowline.checkpoint.durable.undo_entries import UNDO_DIRECTORY
from bowline.errors import ConfigError
from tests.checkpoints import snapshot

OLD, NEW = b'{"tie": true}', b'{"tie": false}'


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "model" / "config.json"
    path.parent.mkdir()
    path.write_bytes(OLD)
    return path


def undo(config: Path) -> Path:
    return config.parent / UNDO_DIRECTORY


def listing(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def file_of(descriptor: int) -> str:
    return str(Path(f"/proc/self/fd/{descriptor}").readlink())


def test_the_new_bytes_are_there_and_the_old_ones_are_kept_with_a_manifest(config: Path) -> None:
    backup = replace_file(config, NEW, why="a test")
    assert config.read_bytes() == NEW
    assert backup.parent == undo(config)
    assert (backup / "config.json").read_bytes() == OLD
    assert json.loads((backup / "manifest.json").read_bytes()) == {
        "version": 1,
        "why": "a test",
        "files": {
            "config.json": {
                "sha256_before": hashlib.sha256(OLD).hexdigest(),
                "sha256_after": hashlib.sha256(NEW).hexdigest(),
            }
        },
    }


def test_two_replacements_in_one_second_keep_both_old_files(config: Path) -> None:
    backups = [replace_file(config, content, why="") for content in (NEW, OLD, NEW)]
    assert len(set(backups)) == 3
    assert [(backup / "config.json").read_bytes() for backup in backups] == [OLD, NEW, OLD]


@pytest.mark.parametrize("mode", [0o600, 0o644, 0o440, 0o664])
def test_the_mode_is_kept_and_the_backup_is_as_private(config: Path, mode: int) -> None:
    config.chmod(mode)
    backup = replace_file(config, NEW, why="")
    assert config.stat().st_mode & 0o7777 == mode
    assert (backup / "config.json").stat().st_mode & 0o7777 == mode


def test_nothing_but_the_file_and_its_backup_is_left(config: Path) -> None:
    (config.parent / "model.safetensors").write_bytes(b"bytes")
    replace_file(config, NEW, why="")
    assert listing(config.parent) == [".bowline", "config.json", "model.safetensors"]
    assert (config.parent / "model.safetensors").read_bytes() == b"bytes"


def test_a_symbolic_link_is_not_written_through(config: Path) -> None:
    blob = config.parent.parent / "blob"
    config.rename(blob)
    config.symlink_to(blob)
    before = snapshot(config.parent.parent)
    with pytest.raises(ConfigError, match="is a symbolic link, expected an ordinary file with one name"):
        replace_file(config, NEW, why="")
    assert snapshot(config.parent.parent) == before


def test_a_file_with_two_names_is_not_replaced(config: Path) -> None:
    os.link(config, config.parent.parent / "second")
    before = snapshot(config.parent.parent)
    with pytest.raises(ConfigError, match="has several hard links"):
        replace_file(config, NEW, why="")
    assert snapshot(config.parent.parent) == before


@pytest.mark.parametrize("missing", [True, False])
def test_a_file_that_cannot_be_read_is_a_config_error(config: Path, missing: bool) -> None:
    config.unlink()
    if not missing:
        config.mkdir()
    with pytest.raises(ConfigError, match="cannot be read"):
        replace_file(config, NEW, why="")


@pytest.mark.parametrize("link", [".bowline", ".bowline/undo"])
@pytest.mark.parametrize("target", ["elsewhere", "gone"])
def test_an_undo_directory_that_leads_away_is_refused_and_does_not_hang(config: Path, link: str, target: str) -> None:
    outside = config.parent.parent / "elsewhere"
    outside.mkdir()
    place = config.parent / link
    place.parent.mkdir(exist_ok=True)
    place.symlink_to(config.parent.parent / target)
    before = snapshot(config.parent.parent)
    with pytest.raises(ConfigError, match="cannot be replaced"):
        replace_file(config, NEW, why="")
    assert snapshot(config.parent.parent) == before


def test_an_undo_directory_that_is_a_file_is_refused(config: Path) -> None:
    (config.parent / ".bowline").write_bytes(b"")
    with pytest.raises(ConfigError, match="cannot be replaced"):
        replace_file(config, NEW, why="")
    assert config.read_bytes() == OLD


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt(), RuntimeError("killed")])
def test_a_stop_at_the_commit_leaves_the_old_file_whole_and_nothing_else(
    config: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def stop(*_: object) -> None:
        raise error

    monkeypatch.setattr(Path, "replace", stop)
    monkeypatch.setattr(os, "replace", stop)
    with pytest.raises(ConfigError if isinstance(error, OSError) else type(error)):
        replace_file(config, NEW, why="")
    assert config.read_bytes() == OLD
    assert listing(config.parent) == ["config.json"]


def test_a_full_disk_while_staging_leaves_the_old_file_whole_and_nothing_else(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync, calls = os.fsync, []

    def full(descriptor: int) -> None:
        calls.append(file_of(descriptor))
        if calls[-1].endswith(".tmp"):
            raise OSError(28, "No space left on device")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ConfigError, match="No space left on device"):
        replace_file(config, NEW, why="")
    assert config.read_bytes() == OLD
    assert listing(config.parent) == ["config.json"]


def test_the_backup_is_on_disk_before_the_file_changes_and_the_directory_after(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def watch_fsync(descriptor: int) -> None:
        events.append(Path(file_of(descriptor)).name)
        fsync(descriptor)

    def watch_replace(self: Path, target: Path) -> Path:
        events.append("commit")
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", watch_fsync)
    monkeypatch.setattr(Path, "replace", watch_replace)
    backup = replace_file(config, NEW, why="")
    staged = events.pop(3)
    assert staged.startswith(".config.json.")
    assert events == ["config.json", "manifest.json", backup.name, "commit", "model"]


def test_a_stop_after_the_commit_keeps_the_backup(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace = Path.replace

    def stop(self: Path, target: Path) -> None:
        replace(self, target)
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", stop)
    with pytest.raises(KeyboardInterrupt):
        replace_file(config, NEW, why="")
    (backup,) = undo(config).iterdir()
    assert (config.read_bytes(), (backup / "config.json").read_bytes()) == (NEW, OLD)


def test_extended_attributes_are_kept(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_bytes(b"{}")
    try:
        os.setxattr(config, "user.origin", b"a hub")
    except OSError:
        pytest.skip("this file system has no extended attributes")
    replace_file(config, b'{"a": 1}', why="test")
    assert os.getxattr(config, "user.origin") == b"a hub"
