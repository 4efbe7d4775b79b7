"""A list of places: one a line, with comments; what is no such list is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from bowline.auditing.queue.place_list import read_places
from bowline.errors import UsageError


def test_lines_are_paths_without_comments_and_spaces(tmp_path: Path) -> None:
    (tmp_path / "list").write_text(
        "# all of them\n\n a b \r\norg/name@main\n  # not this\nü\u2028v\n", encoding="utf-8"
    )
    assert read_places(tmp_path / "list") == ["a b", "org/name@main", "ü\u2028v"]


@pytest.mark.parametrize(
    ("content", "seen"),
    [(b"# nothing\n\n", "lists no path"), (b"a\n\xff\n", "byte 2 is not UTF-8"), (None, "cannot be read")],
)
def test_what_is_no_list_is_refused(content: bytes | None, seen: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "list").write_bytes(content)
    with pytest.raises(UsageError, match=seen):
        read_places(tmp_path / "list")
