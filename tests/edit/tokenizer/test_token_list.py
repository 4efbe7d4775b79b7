"""Lists of tokens are read line by line, and a wrong line is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from bowline.checkpoint.places.local_directory import LocalDirectory
from bowline.edit.tokenizer import keep_file, read_token_list, read_tokenizer
from bowline.errors import UsageError
from tests.edit.tokenizer.small_tokenizers import byte_level


def test_lines_are_tokens_json_strings_or_ids(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(byte_level(), encoding="utf-8")
    tokenizer = read_tokenizer(LocalDirectory(tmp_path))
    path = tmp_path / "keep.txt"
    path.write_bytes('Ġ\r\n"\\u0120"\n300\n\n5\n"'.encode())
    space = tokenizer.ids["Ġ"]
    assert keep_file(tokenizer, path) == [space, space, 300, tokenizer.ids["5"], tokenizer.ids['"']]
    path.write_text("Ġ\n99999\n", encoding="utf-8")
    with pytest.raises(UsageError, match="line 2: '99999' is not a token, and not the id of one"):
        keep_file(tokenizer, path)


def test_lists_of_new_tokens_keep_spaces_and_order(tmp_path: Path) -> None:
    path = tmp_path / "add.txt"
    path.write_text('<b>\n  two\n"line\\n"\n<a>', encoding="utf-8")
    assert read_token_list(path) == ["<b>", "  two", "line\n", "<a>"]


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    path = tmp_path / "add.txt"
    with pytest.raises(UsageError, match=r"add\.txt: No such file"):
        read_token_list(path)
    path.write_bytes(b"a\n\xff\n")
    with pytest.raises(UsageError, match="not UTF-8 at byte 2"):
        read_token_list(path)
    path.write_bytes(b'a\n"\\q"\n')
    with pytest.raises(UsageError, match="line 2: not a JSON string"):
        read_token_list(path)
