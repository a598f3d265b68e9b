"""`python -m draftwood.cli`."""

from draftwood.cli.app import main

main()
