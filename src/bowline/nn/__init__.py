"""Ties in live models, any `torch.nn.Module`: find, declare, check, make, undo, keep, save and resize them."""

from __future__ import annotations

from bowline.functional.loss import AdapterTerms, chosen_backend, linear_cross_entropy
from bowline.functional.tied_lookup import tied_embedding
from bowline.nn.adapters.lora import merge_lora
from bowline.nn.guards.keep_tied import keep_tied
from bowline.nn.guards.tie_guard import TieGuard
from bowline.nn.init import find_roles, init_weights, measure_loss
from bowline.nn.init.apply_once import apply_once
from bowline.nn.modules.cross_entropy_module import LinearCrossEntropy
from bowline.nn.modules.gradient_split import GradientSplit, split_gradient
from bowline.nn.modules.heads import LMHead, MLMHead
from bowline.nn.modules.quantize_tied import quantize_tied
from bowline.nn.modules.tied_embedding import TiedEmbedding
from bowline.nn.modules.tied_loss import TiedLoss, TiedLossStatus, use_tied_loss
from bowline.nn.state.load_checkpoint import load_checkpoint
from bowline.nn.state.load_state import LoadReport, load_state
from bowline.nn.state.save_checkpoint import save_checkpoint
from bowline.nn.ties.declared_ties import declared_ties
from bowline.nn.ties.shared_parameters import FoundTies, find_ties
from bowline.nn.ties.tie_check import check_ties
from bowline.nn.ties.tie_report import Remark, TieCheck, TieReport
from bowline.nn.ties.tying import tie_weights
from bowline.nn.ties.untying import untie_weights
from bowline.nn.ties.weight_sync import SyncedEnd, WeightSync, check_weight_sync
from bowline.nn.tree.unique_parameters import unique_parameters
from bowline.nn.vocabulary.resize import VocabChange, resize_vocab

__all__ = [
    "AdapterTerms",
    "FoundTies",
    "GradientSplit",
    "LMHead",
    "LinearCrossEntropy",
    "LoadReport",
    "MLMHead",
    "Remark",
    "SyncedEnd",
    "TieCheck",
    "TieGuard",
    "TieReport",
    "TiedEmbedding",
    "TiedLoss",
    "TiedLossStatus",
    "VocabChange",
    "WeightSync",
    "apply_once",
    "check_ties",
    "check_weight_sync",
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
