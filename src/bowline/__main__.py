"""`python -m bowline`."""

from bowline.cli import main

main()
