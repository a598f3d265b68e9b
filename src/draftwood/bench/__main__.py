"""`python -m draftwood.bench`: the benchmarks without the rest of the command line."""

from __future__ import annotations

import sys

from draftwood.bench.cli import app
from draftwood.errors import DraftwoodError


def main() -> None:
    """Runs a benchmark; a user's mistake is one line on stderr and exit code 2."""
    try:
        app()
    except DraftwoodError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
