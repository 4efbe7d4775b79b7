"""Ties between live modules, of any `torch.nn.Module`: found, declared, checked, made, undone, kept, saved, resized."""

from __future__ import annotations

from bowline.nn.gradient_split import GradientSplit, split_gradient
from bowline.nn.heads import LMHead, MLMHead
from bowline.nn.init import find_roles, init_weights, measure_loss
from bowline.nn.lookup import TiedEmbedding, tied_embedding
from bowline.nn.lora import merge_lora
from bowline.nn.loss import LinearCrossEntropy, chosen_backend, linear_cross_entropy
from bowline.nn.once import apply_once, unique_parameters
from bowline.nn.quantize import quantize_tied
from bowline.nn.state.load import LoadReport, load_state
from bowline.nn.state.load_checkpoint import load_checkpoint
from bowline.nn.state.save_checkpoint import save_checkpoint
from bowline.nn.tied_loss import TiedLoss, use_tied_loss
from bowline.nn.ties.check import check_ties
from bowline.nn.ties.declared import declared_ties
from bowline.nn.ties.find import FoundTies, find_ties
from bowline.nn.ties.guard import TieGuard
from bowline.nn.ties.keep import keep_tied
from bowline.nn.ties.report import Remark, TieCheck, TieReport
from bowline.nn.ties.tying import tie_weights
from bowline.nn.ties.untying import untie_weights
from bowline.nn.vocabulary.resize import VocabChange, resize_vocab

__all__ = [
    "FoundTies",
    "GradientSplit",
    "LMHead",
    "LinearCrossEntropy",
    "LoadReport",
    "MLMHead",
    "Remark",
    "TieCheck",
    "TieGuard",
    "TieReport",
    "TiedEmbedding",
    "TiedLoss",
    "VocabChange",
    "apply_once",
    "check_ties",
    "chosen_backend",
    "declared_ties",
    "find_roles",
    "find_ties",
    "init_weights",
    "keep_tied",
    "linear_cross_entropy",
    "load_checkpoint",
    "load_state",
    "measure_loss",
    "merge_lora",
    "quantize_tied",
    "resize_vocab",
    "save_checkpoint",
    "split_gradient",
    "tie_weights",
    "tied_embedding",
    "unique_parameters",
    "untie_weights",
    "use_tied_loss",
]
