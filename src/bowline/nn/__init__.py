"""Ties between live modules, of any `torch.nn.Module`: found, declared, checked, made, undone, kept, saved, resized."""

from __future__ import annotations

from bowline.nn.ties.check import check_ties
from bowline.nn.ties.declared import declared_ties
from bowline.nn.ties.find import FoundTies, find_ties
from bowline.nn.ties.report import Remark, TieCheck, TieReport
from bowline.nn.ties.tying import tie_weights
from bowline.nn.ties.untying import untie_weights

__all__ = [
    "FoundTies",
    "Remark",
    "TieCheck",
    "TieReport",
    "check_ties",
    "declared_ties",
    "find_ties",
    "tie_weights",
    "untie_weights",
]
