"""What every step of an edit is: a record that prints as one line, and makes a new draft of a draft."""

from __future__ import annotations

from typing import ClassVar, Protocol

from bowline.edit.draft import Draft

__all__ = ["Step"]


class Step(Protocol):
    """One change; `str()` of it is its line in the plan and in the history."""

    verb: ClassVar[str]
    """The name of the command that does it."""

    def apply(self, draft: Draft) -> Draft:
        """The draft after this step. Raises a `BowlineError` for what cannot be done, and changes nothing."""
