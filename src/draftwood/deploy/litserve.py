"""LitServe: the same batches for a server that is maintained.

from litserve import LitServer
from draftwood.deploy.litserve import make_api

LitServer(make_api("smollm2-135m", max_batch_size=8, batch_timeout=0.02)).run(port=8000)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from draftwood.deploy.batch import BatchRunner, Reply
from draftwood.errors import MissingExtraError
from draftwood.llm import LLM


def make_api(model: str, *, llm: dict[str, Any] | None = None, **options: Any) -> Any:
    """A `litserve.LitAPI` that answers `/predict`.

    Args:
        model: an alias, a hub id, a folder or a `.gguf` file.
        llm: further arguments of `LLM`.
        options: of `LitAPI`: `max_batch_size`, `batch_timeout`, ...

    Raises:
        MissingExtraError: LitServe is not installed.
    """
    try:
        from litserve import LitAPI
    except ImportError as error:
        raise MissingExtraError("litserve", "litserve") from error

    class DraftwoodAPI(LitAPI):  # type: ignore[misc]
        """One engine; a batch of requests is one packed run."""

        def setup(self, device: str) -> None:
            """Loads the model, in the worker's process."""
            given = {"device": device, **(llm or {})}
            self.runner = BatchRunner(LLM(model, **given))

        def batch(self, inputs: Sequence[Any]) -> list[Any]:
            """Bodies stay what they are."""
            return list(inputs)

        def predict(self, x: Any) -> Any:
            """Answers a batch, or one body where batches are of one."""
            batched = isinstance(x, list)
            replies = self.runner.answer(x if batched else [x])
            return replies if batched else replies[0]

        def unbatch(self, output: Any) -> Any:
            """One reply for each body."""
            return output

        def encode_response(self, output: Reply) -> dict[str, Any]:
            """The body; a wrong request gets its status."""
            if output.status != 200:
                from fastapi import HTTPException

                raise HTTPException(output.status, output.body["error"])
            return output.body

    return DraftwoodAPI(**options)
