"""`bowline audit`: checks whether head and embedding are one matrix, what the config says, and what loaders will do.

An audit opens the checkpoint (`bowline.checkpoint`), looks up the ties that its class declares (`bowline.families`),
gathers the evidence once (`evidence_gathering`), predicts what each loader will do (`loaders`), runs the rules, one
function per finding (`rules`), and writes a report (`report`). Nothing here imports torch. The public names are listed
in `__init__.pyi`, and each is imported when it is first used.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
