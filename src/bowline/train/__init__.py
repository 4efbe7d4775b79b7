"""Training: a loop for any module that takes `labels`, and the whole way from plain text to a trained model.

The names are listed in `__init__.pyi` and imported when they are first used: the options of `bowline train` need no
torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
