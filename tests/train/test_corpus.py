"""Files to documents: in order, whole, and what is no text skipped and counted, or refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bowline.errors import UsageError
from bowline.train.text.corpus import PIECE, Corpus, _pieces, find_text


def test_a_directory_gives_its_files_sorted_and_no_hidden_ones(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.txt", "a/y.md", ".git/config", "c/.hidden"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(name)
    assert list(find_text(tmp_path)) == ["a/y.md", "a/z.txt", "b.txt"]


def test_a_file_that_is_named_twice_is_read_once(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("knot")
    assert list(find_text([tmp_path / "a.txt", tmp_path])) == ["knot"]


def test_bytes_that_are_no_utf8_are_skipped_and_counted(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"kn\xffot\xc3 caf\xc3\xa9")
    corpus = find_text(tmp_path)
    assert list(corpus) == ["knot café"]
    assert corpus.survey.skipped_bytes == 2
    assert "skipped 2 bytes that are not valid UTF-8" in str(corpus.survey)


def test_strict_refuses_bytes_that_are_no_utf8_and_says_where(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"kn\xffot")
    with pytest.raises(UsageError, match=r"a\.txt: byte 2 is not valid UTF-8 \(0xff\)"):
        list(find_text(tmp_path, strict=True))


def test_a_file_with_nul_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("knot")
    (tmp_path / "image.png").write_bytes(b"\x89PNG\0\0")
    corpus = find_text(tmp_path)
    assert list(corpus) == ["knot"]
    assert (corpus.survey.files, corpus.survey.skipped_files) == (1, 1)
    assert str(corpus.survey).endswith(" from 1 file; skipped 1 file that is not text")
    with pytest.raises(UsageError, match=r"image\.png: is not a text file: byte 4 is NUL"):
        list(find_text(tmp_path, strict=True))


def test_line_ends_and_byte_order_marks_of_windows_are_gone(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\r\n")
    assert list(find_text(tmp_path)) == ["one\ntwo\n"]


@pytest.mark.parametrize("content", [b"", b" \n\t\n", b"\xff\xfe", b"\0\0"])
def test_no_text_is_an_error_that_names_the_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(UsageError, match=r"a\.txt: no text, expected text files in UTF-8"):
        _ = find_text(tmp_path).survey


def test_what_is_not_there_and_what_is_empty_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nowhere: does not exist"):
        find_text(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="no files, expected text"):
        find_text(tmp_path)
    with pytest.raises(UsageError, match="no data: no files"):
        find_text([])


def test_few_files_are_cut_at_blank_lines_and_many_are_whole(tmp_path: Path) -> None:
    text = "\n\n".join(f"paragraph {at} " + "word " * 300 for at in range(40))
    (tmp_path / "0.txt").write_text(text)
    few = list(find_text(tmp_path))
    assert len(few) > 3
    assert "".join(few) == text
    assert all(len(piece) >= PIECE for piece in few[:-1])
    assert all(piece.startswith("paragraph") for piece in few)
    for at in range(1, 20):
        (tmp_path / f"{at}.txt").write_text("short")
    assert next(iter(find_text(tmp_path))) == text


def test_files_that_are_no_text_do_not_count_as_many(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\n\n".join(["knot " * 50] * 200))
    for at in range(25):
        (tmp_path / f"{at}.png").write_bytes(b"\x89PNG\0")
    survey = find_text(tmp_path).survey
    assert survey.documents > 1
    assert (survey.files, survey.skipped_files) == (1, 25)


@pytest.mark.parametrize("name", ["a" * 300, "a\0b"])
def test_a_name_that_no_file_can_have_is_an_error_of_ours(name: str) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        find_text(name)


@pytest.mark.parametrize("run", ["run", "../text/run", "link/run"])
def test_what_is_below_the_directory_of_the_run_is_left_out(run: str, tmp_path: Path) -> None:
    text = tmp_path / "text"
    (text / "run").mkdir(parents=True)
    (tmp_path / "text" / "link").symlink_to(text)
    for path in (text / "a.txt", text / "run.txt", text / "run" / "b.txt"):
        path.write_text("knot\n")
    assert [path.name for path in find_text(text, without=text / run).files] == ["a.txt", "run.txt"]
    assert len(find_text(text, without=text).files) == 3  # whose directory that is, is another's to ask


@given(st.lists(st.sampled_from(["\n", "\n\n", "a" * 5000, "b c\n" * 900]), max_size=20).map("".join))
def test_the_pieces_of_a_text_are_the_text(text: str) -> None:
    assert "".join(_pieces(text)) == text


def test_the_fingerprint_is_that_of_the_text(tmp_path: Path) -> None:
    first, second = tmp_path / "a.txt", tmp_path / "b.txt"
    first.write_text("one")
    second.write_text("two")
    before = Corpus([first, second]).survey.fingerprint
    assert Corpus([first, second]).survey.fingerprint == before
    assert Corpus([second, first]).survey.fingerprint != before
    second.write_text("twp")
    assert Corpus([first, second]).survey.fingerprint != before


def test_the_standard_library_is_there_without_its_tests_and_the_same_twice() -> None:
    corpus = find_text("stdlib")
    names = {path.name for path in corpus.files}
    assert {"argparse.py", "typing.py"} <= names
    assert not {"test_support.py", "cp1252.py", "topics.py"} & names
    assert not any("site-packages" in path.parts or "test" in path.parts for path in corpus.files)
    assert corpus.survey.fingerprint == find_text("stdlib").survey.fingerprint
    assert corpus.survey.characters == sum(map(len, corpus))
