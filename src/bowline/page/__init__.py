"""Pages for people: an audit, or two checkpoints side by side, as one HTML file that requests nothing.

The file holds its style, its script and its data. Every string of a checkpoint is escaped when the page is made, or set
as text by the script, so that none can run; a content security policy forbids every request and every other script.
What a plot shows is also in a table, and all but the search works without JavaScript.
"""

from __future__ import annotations

from bowline.page.audit_page import audit_page
from bowline.page.comparison_page import comparison_page

__all__ = ["audit_page", "comparison_page"]
