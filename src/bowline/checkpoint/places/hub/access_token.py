"""The access token: finds it, sends it to the Hub alone, and keeps it out of messages."""

from __future__ import annotations

import re

from bowline.errors import RemoteError, UsageError

__all__ = ["Secret"]


class Secret:
    """A token that appears only in the `Authorization` header."""

    __slots__ = ("_given",)

    def __init__(self, given: str | bool | None) -> None:
        self._given = given

    def resolved(self) -> Secret:
        """The token that `huggingface_hub` would send, from a login, a file or an environment variable."""
        if isinstance(self._given, str) or self._given is False:
            return self
        from huggingface_hub import constants, get_token

        if self._given is None and constants.HF_HUB_DISABLE_IMPLICIT_TOKEN:
            return Secret(False)
        trouble = ""
        try:
            found = Secret(get_token())
        except Exception as error:
            trouble = type(error).__name__  # its text may quote the token
        if trouble:
            raise RemoteError(
                f"the stored Hugging Face token could not be read ({trouble})", help="log in again with `hf auth login`"
            )
        if self._given is True and not found:
            raise UsageError("token=True, but no Hugging Face token is stored", help="log in with `hf auth login`")
        return found

    def __bool__(self) -> bool:
        return isinstance(self._given, str) and self._given != ""

    def header(self) -> dict[str, str]:
        """The header that sends the token; empty without a token."""
        return {"Authorization": f"Bearer {self._given}"} if self else {}

    def struck_from(self, text: str) -> str:
        """`text` without the token, which a server may have echoed (in lower case, as part of a host name)."""
        token = str(self._given)
        if len(token) < 8:  # shorter than any token of the Hub; it would match parts of words
            return text
        return re.sub(re.escape(token), "[token]", text, flags=re.IGNORECASE)

    def __repr__(self) -> str:
        return "<token>" if self else "<no token>"
