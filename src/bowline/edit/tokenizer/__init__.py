"""Prunes and extends a tokenizer by its files, so that text splits as before; no torch.

Removing a token that the split of a text never chose leaves the split as it was, if everything stays on which its
choices rest (`selection`, `merge_closure`). So a pruned tokenizer splits its corpus, and every text whose tokens all
stay, to exactly the mapped ids; other text is spelled by smaller tokens. `check_split` compares it on the corpus.

`read_tokenizer` is the beginning: it parses `tokenizer.json` strictly and refuses a tokenizer that has none.
"""

from __future__ import annotations

from bowline.edit.tokenizer.merge_closure import MergeClosure, by_merges, by_scores
from bowline.edit.tokenizer.obstacles import check_prunable
from bowline.edit.tokenizer.pruned_files import PrunedFiles, rewritten_files
from bowline.edit.tokenizer.selection import Reason, TokenSelection, select_tokens, token_map, token_texts
from bowline.edit.tokenizer.split_check import SplitCheck, check_split
from bowline.edit.tokenizer.stored_tokenizer import Kind, StoredTokenizer, read_tokenizer
from bowline.edit.tokenizer.token_addition import TokenAddition, added_tokens, pieces
from bowline.edit.tokenizer.token_counts import CorpusCount, count_tokens
from bowline.edit.tokenizer.token_list import keep_file, read_token_list

__all__ = [
    "CorpusCount",
    "Kind",
    "MergeClosure",
    "PrunedFiles",
    "Reason",
    "SplitCheck",
    "TokenAddition",
    "TokenSelection",
    "StoredTokenizer",
    "added_tokens",
    "by_merges",
    "by_scores",
    "check_prunable",
    "check_split",
    "count_tokens",
    "keep_file",
    "pieces",
    "read_token_list",
    "read_tokenizer",
    "rewritten_files",
    "select_tokens",
    "token_map",
    "token_texts",
]
