"""Reads the fields of a parsed JSON document whose types are not known yet."""

from __future__ import annotations

from typing import Final, NamedTuple, NoReturn, TypeVar

from bowline.checkpoint.formats.strict_json import shown
from bowline.errors import FormatError

__all__ = ["FETCH_AGAIN", "LARGEST_NUMBER", "JsonDocument"]

FETCH_AGAIN: Final = "fetch the file again, or export the model again with torch.export.save"
LARGEST_NUMBER: Final = (1 << 63) - 1
KINDS: Final = {dict: "an object", list: "an array", str: "a text", int: "a number", bool: "true or false"}
Kind = TypeVar("Kind", dict[str, object], list[object], str, int, bool)


class JsonDocument(NamedTuple):
    """The place of a document, for messages: its file, and its entry in the archive."""

    place: str

    def member(self, holder: object, key: str, kind: type[Kind]) -> Kind:
        """The field `key` of an object, which must have the type `kind`.

        Raises:
            FormatError: the holder is no object, or the field is missing or has another type.
        """
        if type(holder) is not dict:
            self.refuse(f"{shown(holder)}, expected an object with {shown(key)}")
        if key not in holder:
            self.refuse(f"{shown(holder)} without {shown(key)}")
        return self.typed(holder[key], shown(key), kind)

    def typed(self, value: object, what: str, kind: type[Kind]) -> Kind:
        """The value, which must have the type `kind`; `what` names it."""
        if type(value) is not kind:
            self.refuse(f"{what} is {shown(value)}, expected {KINDS[kind]}")
        return value

    def size(self, value: object, what: str) -> int:
        """A size that is stated as `{"as_int": number}`, and is not negative."""
        number = self.member(value, "as_int", int)
        if not 0 <= number <= LARGEST_NUMBER:
            self.refuse(f"{what} is {shown(number)}, expected 0 to 2^63 - 1")
        return number

    def refuse(self, seen: str, help: str = FETCH_AGAIN) -> NoReturn:
        """Raise the `FormatError` about this document."""
        raise FormatError(f"{self.place}: {seen}", help=help)
