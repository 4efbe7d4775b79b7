"""Initialises weights by a recipe: the role of each tensor, its distribution, and the loss that results."""

from __future__ import annotations

from bowline.nn.init.fused_matrices import Fused
from bowline.nn.init.init_report import Drawn, InitReport
from bowline.nn.init.init_weights import init_weights
from bowline.nn.init.measured_loss import MeasuredLoss, measure_loss
from bowline.nn.init.roles import find_roles

__all__ = ["Drawn", "Fused", "InitReport", "MeasuredLoss", "find_roles", "init_weights", "measure_loss"]
