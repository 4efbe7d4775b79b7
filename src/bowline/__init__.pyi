"""The public names, each listed once: `lazy_loader` reads this file when bowline is imported, type checkers always."""

from . import auditing as auditing
from . import checkpoint as checkpoint
from . import edit as edit
from . import errors as errors
from . import families as families
from . import functional as functional
from . import geometry as geometry
from . import models as models
from . import nn as nn
from . import plots as plots
from . import recipes as recipes
from . import study as study
from . import tie as tie
from . import train as train
from .auditing import audit as audit
from .edit import open_checkpoint as open_checkpoint
from .export import export as export
from .nn import LMHead as LMHead
from .nn import MLMHead as MLMHead
from .nn import TieGuard as TieGuard
from .nn import apply_once as apply_once
from .nn import check_ties as check_ties
from .nn import declared_ties as declared_ties
from .nn import find_ties as find_ties
from .nn import init_weights as init_weights
from .nn import keep_tied as keep_tied
from .nn import linear_cross_entropy as linear_cross_entropy
from .nn import load_checkpoint as load_checkpoint
from .nn import load_state as load_state
from .nn import merge_lora as merge_lora
from .nn import quantize_tied as quantize_tied
from .nn import resize_vocab as resize_vocab
from .nn import save_checkpoint as save_checkpoint
from .nn import split_gradient as split_gradient
from .nn import tie_weights as tie_weights
from .nn import unique_parameters as unique_parameters
from .nn import untie_weights as untie_weights
from .nn import use_tied_loss as use_tied_loss
from .recipes import RECIPES as RECIPES
from .recipes import Recipe as Recipe
from .recipes import expected_loss as expected_loss
from .tie import Tie as Tie
from .tie import TieState as TieState

__version__: str
