"""The documentation's site: what it has beside the pages of `docs/`. `mkdocs.yml` names `hooks.py`."""
