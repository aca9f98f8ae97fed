"""`python -m launcher` is the console script `graft`."""

from launcher.cli import main

main()
