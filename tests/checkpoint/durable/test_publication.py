"""A directory is published atomically, and files that are not replaced are carried over."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from bowline.checkpoint.durable import exchange, publication
from bowline.checkpoint.durable.publication import publishing
from bowline.errors import CheckpointError
from tests.checkpoints import snapshot

OLD = {"model-00001-of-00002.safetensors": b"1", "model-00002-of-00002.safetensors": b"2", "config.json": b"old"}
NEW = {"model.safetensors": b"12", "config.json": b"new"}
KEPT = {"README.md": b"read me", "tokenizer.json": b"{}", ".bowline/undo/one/config.json": b"older"}


def weights(name: str) -> bool:
    return name.startswith("model") and ".safetensors" in name


def fill(directory: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return directory


def read(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def publish_new(directory: Path, files: dict[str, bytes] = NEW) -> None:
    with publishing(directory, weights) as stage:
        fill(stage, files)


def siblings(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.parent.iterdir() if path != directory)


def refusing(code: int) -> Callable[..., None]:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    return refuse


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return fill(tmp_path / "root" / "model", {**OLD, **KEPT})


@pytest.fixture(params=["exchange", "two renames"])
def either_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the step that exchanges two names, and on a file system that has none."""
    if request.param == "two renames":
        monkeypatch.setattr(exchange, "exchange", refusing(errno.EINVAL))


# --- what is there afterwards ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("either_way")
def test_the_new_files_are_there_the_old_weights_are_gone_and_the_rest_is_kept(model: Path) -> None:
    publish_new(model)
    assert read(model) == {**NEW, **KEPT}
    assert siblings(model) == []


def test_a_directory_that_was_not_there_is_made_with_its_parents(tmp_path: Path) -> None:
    publish_new(tmp_path / "a" / "b" / "model")
    assert read(tmp_path) == {f"a/b/model/{name}": content for name, content in NEW.items()}
    assert stat.S_IMODE((tmp_path / "a/b/model").stat().st_mode) == stat.S_IMODE((tmp_path / "a").stat().st_mode)


def test_until_the_end_the_old_directory_is_untouched(model: Path) -> None:
    before = snapshot(model)
    with publishing(model, weights) as stage:
        fill(stage, NEW)
        assert snapshot(model) == before
        assert stage.parent == model.parent
        assert stage.name.startswith(".model.")


def test_what_is_kept_is_the_same_file_and_not_a_copy(model: Path) -> None:
    kept = {name: (model / name).stat().st_ino for name in KEPT}
    publish_new(model)
    assert {name: (model / name).stat().st_ino for name in KEPT} == kept
    assert {(model / name).stat().st_nlink for name in KEPT} == {1}


@pytest.mark.parametrize("code", [errno.EPERM, errno.EMLINK, errno.ENOTSUP])
def test_where_links_are_refused_what_is_kept_is_copied(
    model: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    readme = model / "README.md"
    readme.chmod(0o640)
    os.utime(readme, (1, 2))
    monkeypatch.setattr(os, "link", refusing(code))
    publish_new(model)
    assert read(model) == {**NEW, **KEPT}
    assert stat.S_IMODE(readme.stat().st_mode) == 0o640
    assert readme.stat().st_mtime == 2


@pytest.mark.usefixtures("either_way")
def test_a_subdirectory_is_kept_whole_whatever_its_files_are_called(model: Path) -> None:
    inner = fill(model / "checkpoint-500", OLD)
    inner.chmod(0o750)
    (model / "empty").mkdir()
    publish_new(model, {**NEW, "onnx/model.onnx": b"new"})
    assert read(inner) == OLD
    assert stat.S_IMODE(inner.stat().st_mode) == 0o750
    assert (model / "empty").is_dir()


def test_a_subdirectory_that_is_on_both_sides_has_the_new_files_and_keeps_the_others(model: Path) -> None:
    fill(model / "onnx", {"model.onnx": b"old", "notes": b"old"})
    publish_new(model, {"onnx/model.onnx": b"new"})
    assert read(model / "onnx") == {"model.onnx": b"new", "notes": b"old"}


def test_publishing_again_and_again_leaves_one_directory(model: Path) -> None:
    for at in range(20):
        publish_new(model, {"model.safetensors": str(at).encode(), "config.json": b"new"})
    assert read(model) == {"model.safetensors": b"19", "config.json": b"new", **KEPT}
    assert siblings(model) == []


def test_what_came_to_the_old_directory_at_the_last_moment_is_kept(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(stage: Path, place: Path) -> None:
        (place / "events.log").write_bytes(b"late")
        exchange.put_in_place(stage, place)

    monkeypatch.setattr(publication, "put_in_place", late)
    publish_new(model)
    assert read(model) == {**NEW, **KEPT, "events.log": b"late"}


# --- links, modes, places -------------------------------------------------------------------------------------------


def test_a_cache_is_not_written_through_and_its_links_are_kept_as_links(tmp_path: Path) -> None:
    blobs = fill(tmp_path / "blobs", {"aa": b"old weights", "bb": b"old config", "cc": b"tokens"})
    snapshots = tmp_path / "snapshots" / "revision"
    snapshots.mkdir(parents=True)
    for name, blob in {"model.safetensors": "aa", "config.json": "bb", "tokenizer.json": "cc"}.items():
        (snapshots / name).symlink_to(Path("../../blobs") / blob)
    (snapshots / "gone").symlink_to("nowhere")
    before = snapshot(blobs)
    publish_new(snapshots)
    assert snapshot(blobs) == before
    assert (snapshots / "tokenizer.json").readlink() == Path("../../blobs/cc")
    assert (snapshots / "gone").readlink() == Path("nowhere")
    assert read(snapshots) == {**NEW, "tokenizer.json": b"tokens"}
    assert not any((snapshots / name).is_symlink() for name in NEW)


def test_a_file_with_a_second_name_elsewhere_is_replaced_here_alone(model: Path, tmp_path: Path) -> None:
    os.link(model / "config.json", tmp_path / "second")
    publish_new(model)
    assert (tmp_path / "second").read_bytes() == OLD["config.json"]
    assert (model / "config.json").read_bytes() == NEW["config.json"]


def test_a_link_to_a_directory_stays_and_its_target_is_replaced(model: Path, tmp_path: Path) -> None:
    latest = tmp_path / "latest"
    latest.symlink_to("root/model")
    publish_new(latest)
    assert latest.readlink() == Path("root/model")
    assert read(model) == {**NEW, **KEPT}
    assert siblings(latest) == ["root"]


def test_a_link_to_a_directory_that_is_not_there_yet_leads_to_the_new_one(tmp_path: Path) -> None:
    latest = tmp_path / "latest"
    latest.symlink_to("new")
    publish_new(latest)
    assert read(tmp_path / "new") == NEW


@pytest.mark.parametrize("mode", [0o755, 0o700, 0o2770])
@pytest.mark.usefixtures("either_way")
def test_the_directory_and_a_file_that_is_replaced_keep_their_modes(model: Path, mode: int) -> None:
    model.chmod(mode)
    (model / "config.json").chmod(0o600)
    with publishing(model, weights) as stage:
        assert stat.S_IMODE(stage.stat().st_mode) == mode  # as private while it is written
        fill(stage, NEW)
    assert stat.S_IMODE(model.stat().st_mode) == mode
    assert stat.S_IMODE((model / "config.json").stat().st_mode) == 0o600


def test_a_mode_that_is_given_while_the_new_files_are_written_is_kept(model: Path) -> None:
    with publishing(model, weights) as stage:
        fill(stage, NEW)
        model.chmod(0o711)
    assert stat.S_IMODE(model.stat().st_mode) == 0o711


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives a directory away")
def test_the_owner_stays(model: Path) -> None:
    os.chown(model, 1234, 5678)
    publish_new(model)
    assert (model.stat().st_uid, model.stat().st_gid) == (1234, 5678)


@pytest.mark.parametrize("inside", [".", ".bowline/undo"])
@pytest.mark.usefixtures("either_way")
def test_a_process_that_stands_in_the_directory_stands_in_the_new_one(
    model: Path, monkeypatch: pytest.MonkeyPatch, inside: str
) -> None:
    here = (model / inside).resolve()
    monkeypatch.chdir(here)
    publish_new(Path(os.path.relpath(model)))
    assert Path.cwd() == here
    assert (Path(os.path.relpath(model)) / "config.json").read_bytes() == NEW["config.json"]


# --- when it fails --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [RuntimeError("no"), KeyboardInterrupt(), OSError(errno.ECONNRESET, "the Hub")])
def test_an_exception_inside_comes_through_and_changes_nothing(model: Path, error: BaseException) -> None:
    before = snapshot(model.parent)
    with pytest.raises(type(error)) as raised, publishing(model, weights) as stage:
        fill(stage, NEW)
        raise error
    assert raised.value is error
    assert snapshot(model.parent) == before


def test_an_exception_inside_leaves_no_parent_behind(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), publishing(tmp_path / "a" / "b" / "model", weights):
        raise RuntimeError("no")
    assert snapshot(tmp_path) == {}


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_inside_is_a_checkpoint_error_and_changes_nothing(model: Path, code: int) -> None:
    before = snapshot(model.parent)
    with (
        pytest.raises(CheckpointError, match=rf"{re.escape(str(model))}: cannot be written: .*help: free space"),
        publishing(model, weights) as stage,
    ):
        fill(stage, NEW)
        raise OSError(code, os.strerror(code))
    assert snapshot(model.parent) == before


@pytest.mark.parametrize("failing", range(1, 8))
@pytest.mark.usefixtures("either_way")
def test_a_disk_that_fails_at_any_synchronisation_changes_nothing(
    model: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    before, calls, fsync = snapshot(model.parent), [], os.fsync

    def fail(descriptor: int) -> None:
        calls.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        if len(calls) == failing:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fsync(descriptor)

    with monkeypatch.context() as patched, pytest.raises(CheckpointError, match="Input/output error"):
        patched.setattr(os, "fsync", fail)
        publish_new(model)
    assert snapshot(model.parent) == before
    assert (calls[-1] == "root") == (failing == 7)  # the seventh and last is that of the directory that holds both


@pytest.mark.parametrize("call", ["link", "symlink", "mkdir", "rename"])
def test_a_disk_that_is_full_when_the_rest_is_carried_over_changes_nothing(
    model: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    (model / "link").symlink_to("README.md")
    before = snapshot(model.parent)
    if call == "rename":
        monkeypatch.setattr(exchange, "exchange", refusing(errno.ENOSYS))
    with pytest.raises(CheckpointError, match="No space left on device"), publishing(model, weights) as stage:
        fill(stage, NEW)
        monkeypatch.setattr(os, call, refusing(errno.ENOSPC))
        monkeypatch.setattr(Path, "rename", refusing(errno.ENOSPC))
    assert snapshot(model.parent) == before


def test_when_the_second_of_two_renames_fails_the_first_is_taken_back(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, rename = snapshot(model.parent), Path.rename

    def stuck(self: Path, target: Path) -> Path:
        if target == model and self.suffix == ".partial":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return rename(self, target)

    monkeypatch.setattr(exchange, "exchange", refusing(errno.EINVAL))
    monkeypatch.setattr(Path, "rename", stuck)
    with pytest.raises(CheckpointError, match="Input/output error"):
        publish_new(model)
    assert snapshot(model.parent) == before


def test_when_it_cannot_be_taken_back_the_error_says_where_the_old_one_is(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, rename = read(model), Path.rename

    def stuck(self: Path, target: Path) -> Path:
        if target == model:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return rename(self, target)

    with monkeypatch.context() as patched, pytest.raises(CheckpointError, match="the old one is complete at") as raised:
        patched.setattr(exchange, "exchange", refusing(errno.EINVAL))
        patched.setattr(Path, "rename", stuck)
        publish_new(model)
    assert raised.value.help is not None
    mv, previous, target = raised.value.help.split()
    assert (mv, target) == ("mv", str(model))
    assert read(Path(previous)) == before
    publish_new(model)  # puts it back first: what is kept comes from it
    assert read(model) == {**NEW, **KEPT}
    assert siblings(model) == []


def test_a_file_is_not_a_directory_to_publish(tmp_path: Path) -> None:
    (tmp_path / "model").write_bytes(b"mine")
    with (
        pytest.raises(CheckpointError, match="model: is not a directory, expected a directory or an unused name"),
        publishing(tmp_path / "model", weights),
    ):
        pytest.fail("nothing is worth writing")
    assert read(tmp_path) == {"model": b"mine"}


def test_a_file_for_a_parent_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"mine")
    with pytest.raises(CheckpointError, match="Not a directory"), publishing(tmp_path / "file" / "model", weights):
        pytest.fail("nothing is worth writing")
    assert read(tmp_path) == {"file": b"mine"}


def test_a_file_that_would_take_the_place_of_a_subdirectory_is_refused(model: Path) -> None:
    before = snapshot(model.parent)
    with pytest.raises(CheckpointError, match=r"Is a directory .*help: a subdirectory there has the name of a new"):
        publish_new(model, {**NEW, ".bowline": b"a file"})
    assert snapshot(model.parent) == before


def test_a_mount_point_is_refused_before_anything_is_written(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = snapshot(model.parent)
    monkeypatch.setattr(os.path, "ismount", lambda path: path == model)
    expected = r"help: it is a mount point.*a directory below it"
    with pytest.raises(CheckpointError, match=expected), publishing(model, weights):
        pytest.fail("nothing is worth writing")
    assert snapshot(model.parent) == before


def test_a_mount_point_that_does_not_look_like_one_is_refused_by_the_system(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = snapshot(model.parent)
    monkeypatch.setattr(exchange, "exchange", refusing(errno.EBUSY))
    with pytest.raises(CheckpointError, match=r"help: it is a mount point"):
        publish_new(model)
    assert snapshot(model.parent) == before


def test_the_root_is_refused() -> None:
    with pytest.raises(CheckpointError, match="mount point"), publishing(Path("/"), weights):
        pytest.fail("nothing is worth writing")


UNPRIVILEGED = """
import fcntl, os, sys
from pathlib import Path
from bowline.checkpoint.durable.publication import publishing
from bowline.errors import CheckpointError
if os.getuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
try:
    with publishing(Path(sys.argv[1]), lambda name: False) as stage:
        (stage / "new").write_bytes(b"")
except CheckpointError as error:
    print(error)
"""


@pytest.mark.parametrize(("of_parent", "of_model"), [(0o555, 0o777), (0o777, 0o555), (0o777, 0o333)])
def test_without_permission_nothing_changes_and_the_error_says_so(of_parent: int, of_model: int) -> None:
    with tempfile.TemporaryDirectory() as open_to_all:
        root = Path(open_to_all)
        model = fill(root / "model", OLD)
        model.chmod(of_model)
        root.chmod(of_parent)
        command = [sys.executable, "-c", UNPRIVILEGED, str(model)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
        root.chmod(0o755)
        model.chmod(0o755)
        assert f"{model}: cannot be written: Permission denied (help: check the permissions" in done.stdout
        assert read(root) == {f"model/{name}": content for name, content in OLD.items()}


# --- what others leave, and others at the same time -----------------------------------------------------------------

DIES = """
import os, signal, sys
from pathlib import Path
from bowline.checkpoint.durable.publication import publishing
with publishing(Path(sys.argv[1]), lambda name: False) as stage:
    (stage / "half").write_bytes(b"half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_publisher_left_goes_with_the_next_publishing(model: Path) -> None:
    for _ in range(2):
        assert subprocess.run([sys.executable, "-c", DIES, str(model)], timeout=60).returncode == -9
        assert [re.sub(r"\d+-[0-9a-f]{8}", "*", name) for name in siblings(model)] == [".model.*.partial"]
    publish_new(model)
    assert read(model) == {**NEW, **KEPT}
    assert siblings(model) == []


def test_a_stage_that_is_in_use_and_a_neighbour_that_looks_like_one_stay(model: Path) -> None:
    neighbours = [
        ".model.partial",
        ".model.1-0000000g.partial",
        ".model.1-00000000.partial.bak",
        ".other.1-00000000.partial",
    ]
    for name in neighbours:
        (model.parent / name).mkdir()
    with publishing(model, weights) as outer:
        publish_new(model, {"model.safetensors": b"inner"})
        assert outer.is_dir()
        assert read(model) == {"model.safetensors": b"inner", "config.json": OLD["config.json"], **KEPT}
        fill(outer, NEW)
    assert read(model) == {**NEW, **KEPT}
    assert siblings(model) == sorted(neighbours)


def test_a_publisher_whose_stage_another_machine_took_for_abandoned_fails_and_changes_nothing(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fcntl, "flock", lambda descriptor, how: None)
    with pytest.raises(CheckpointError, match="cannot be written: No such file"), publishing(model, weights) as stage:
        fill(stage, NEW)
        publish_new(model, {"model.safetensors": b"theirs"})
    assert read(model) == {"model.safetensors": b"theirs", "config.json": OLD["config.json"], **KEPT}
    assert siblings(model) == []


def test_where_directories_have_no_locks_what_a_killed_publisher_left_stays(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = model.parent / ".model.1-00000000.partial"
    left.mkdir()
    monkeypatch.setattr(fcntl, "flock", refusing(errno.ENOLCK))
    publish_new(model)
    assert read(model) == {**NEW, **KEPT}
    assert siblings(model) == [left.name]


@pytest.mark.usefixtures("either_way")
def test_a_directory_that_comes_or_goes_while_a_new_one_is_written_is_no_obstacle(model: Path) -> None:
    with publishing(model, weights) as stage:
        fill(stage, NEW)
        model.rename(model.parent / "away")
    assert read(model) == NEW
    another = model.parent / "another"
    with publishing(another, weights) as stage:
        fill(stage, NEW)
        fill(another, {**OLD, **KEPT})
    assert read(another) == {**NEW, **KEPT}
