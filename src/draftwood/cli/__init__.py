"""The command line: `draftwood generate | chat | pull | doctor | demo | bench`.

Nothing here imports torch or transformers before a command needs them, so that help and mistakes
answer at once. What a program may read (text, JSON) goes to stdout, everything else to stderr.
"""

from draftwood.cli.app import main

__all__ = ["main"]
