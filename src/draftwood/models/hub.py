"""A model's files from the Hugging Face hub, into the hub's own cache (moved by HF_HOME)."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import errors, snapshot_download
from huggingface_hub.utils.tqdm import tqdm

from draftwood.errors import CapacityError, DownloadError, ModelError, first_line
from draftwood.models.progress import Progress

_WANTED = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken"]
_LEFT_OUT = ["*/*", "consolidated*"]  # other formats of the same weights


def snapshot(name: str, revision: str | None, progress: Progress, unknown: str) -> Path:
    """The folder of hub model `name`; its own name is the commit. Downloads what is missing.

    Without a network, a complete earlier download is used. `unknown` says what else the name is
    not, and starts the message if the hub does not know it. Raises ModelError if there is no such
    model or no access to it, DownloadError if the hub cannot be reached, CapacityError if the disk
    is full.
    """
    with _one_line_errors(name, unknown):
        folder = snapshot_download(
            name,
            revision=revision,
            allow_patterns=_WANTED,
            ignore_patterns=_LEFT_OUT,
            tqdm_class=_reporting(progress, f"downloading {name}"),
        )
    return Path(folder)


@contextmanager
def _one_line_errors(name: str, unknown: str) -> Iterator[None]:
    try:
        yield
    except errors.GatedRepoError as error:
        raise ModelError(
            f"{name} is gated: accept its licence on huggingface.co and run  hf auth login"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ModelError(f"the hub has the model {name}, but not this revision of it") from error
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise ModelError(f"{unknown}, and the hub has no such model") from error
    except Exception as error:  # the errors of its transport differ between the hub's versions
        raise _failure(name, unknown, error) from error


def _failure(name: str, unknown: str, error: Exception) -> Exception:
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return CapacityError(
            f"the disk is too small for {name}: make room, or set HF_HOME to a folder on a larger "
            "disk"
        )
    if isinstance(error, errors.LocalEntryNotFoundError):
        return DownloadError(f"{unknown}, and the hub could not be reached")
    return DownloadError(f"downloading {name} from the hub failed ({first_line(error)}): try again")


def _reporting(progress: Progress, stage: str) -> type[tqdm]:
    """A bar for huggingface_hub that shows nothing and reports its bytes to `progress`."""

    class Reporting(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            start: Any = super().__init__
            start(*args, **kwargs | {"disable": True})
            # One of the hub's bars counts bytes that travel, one bytes on the disk: take these.
            self._counts = kwargs.get("name") == "huggingface_hub.snapshot_download"

        def update(self, n: float | None = 1) -> None:
            if not self._counts:
                return
            with self.get_lock():  # files are downloaded by several threads
                self.n += n or 0
                total = int(self.total or 0)
                progress(stage, min(int(self.n), total), total)

    return Reporting
