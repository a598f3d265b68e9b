"""LitServe: the same batches for a server that is maintained.

    from litserve import LitServer
    from draftwood.deploy.litserve import DraftwoodAPI

    if __name__ == "__main__":
        api = DraftwoodAPI("smollm2-135m", max_batch_size=8, batch_timeout=0.02)
        LitServer(api).run(port=8000)

The module needs LitServe: its workers are processes that import the class by its name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from draftwood.deploy.batch import BatchRunner, Reply
from draftwood.errors import MissingExtraError
from draftwood.llm import LLM

try:
    from litserve import LitAPI
except ImportError as _error:
    raise MissingExtraError("litserve", "litserve") from _error


class DraftwoodAPI(LitAPI):  # type: ignore[misc]
    """One engine behind `/predict`; a batch of requests is one packed run.

    Args:
        model: an alias, a hub id, a folder or a `.gguf` file.
        llm: further arguments of `LLM`.
        options: of `LitAPI`: `max_batch_size`, `batch_timeout`, ...
    """

    def __init__(self, model: str, llm: dict[str, Any] | None = None, **options: Any) -> None:
        super().__init__(**options)
        self._model = model
        self._options = llm or {}

    def setup(self, device: str) -> None:
        """Loads the model, in the worker's process."""
        self._runner = BatchRunner(LLM(self._model, **{"device": device, **self._options}))

    def batch(self, inputs: Sequence[Any]) -> list[Any]:
        """Bodies stay what they are."""
        return list(inputs)

    def predict(self, x: Any) -> Any:
        """Answers a batch, or one body where batches are of one."""
        if isinstance(x, list):
            return self._runner.answer(x)
        return self._runner.answer([x])[0]

    def unbatch(self, output: Sequence[Reply]) -> list[Reply]:
        """One reply for each body."""
        return list(output)

    def encode_response(self, output: Reply) -> Any:
        """The body; a wrong request gets its status."""
        if output.status == 200:
            return output.body
        from fastapi.responses import JSONResponse

        # Returned, not raised: LitServe answers a whole batch with an exception.
        return JSONResponse({"detail": output.body["error"]}, output.status)
