"""Weights drawn by a recipe: which role each tensor plays, what it is drawn from, and the loss that comes of it."""

from __future__ import annotations

from bowline.nn.init.fused import Fused
from bowline.nn.init.measure import MeasuredLoss, measure_loss
from bowline.nn.init.report import Drawn, InitReport
from bowline.nn.init.roles import find_roles
from bowline.nn.init.weights import init_weights

__all__ = ["Drawn", "Fused", "InitReport", "MeasuredLoss", "find_roles", "init_weights", "measure_loss"]
