"""Programs that some tests need, and what happens where they are missing."""

from __future__ import annotations

import os
import shutil

import pytest

SERVICES, BROWSER = "DRAFTWOOD_REQUIRE_SERVICES", "DRAFTWOOD_REQUIRE_BROWSER"


def need(program: str, package: str | None = None, required_by: str = SERVICES) -> None:
    """Skips where a program is missing, or fails where the variable `required_by` is set."""
    if shutil.which(program) is None:
        package = package or program
        reason = f"no {program}: apt-get install --no-install-recommends {package}"
        if os.environ.get(required_by):
            pytest.fail(reason)
        pytest.skip(reason)
