"""TorchServe: a handler whose batch is one packed run of the engine, and its archive.

TorchServe collects `batch_size` requests or waits `max_batch_delay`; the handler answers them in
one packed run. It is archived upstream; `deploy/litserve.py` is the same for a server that is
maintained.

A `.mar` is a zip file, written here (no packer has to be installed):

    MAR-INF/MANIFEST.json   names the handler and the configuration
    draftwood_handler.py    one class that inherits from the handler below
    draftwood.json          what to load
    model-config.yaml       batch size, delay, workers
    model/                  the model's files, if they are included
"""

from __future__ import annotations

import json
import os
import re
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from time import perf_counter
from typing import Any

from draftwood.deploy.batch import BatchRunner, Reply
from draftwood.errors import ConfigError
from draftwood.llm import LLM

_HANDLER = '''"""Made by `draftwood archive`."""

from draftwood.deploy.torchserve import DraftwoodHandler


class Handler(DraftwoodHandler):
    """What TorchServe looks for: the one class of this module."""
'''


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchiveOptions:
    """How TorchServe shall run a model.

    Attributes:
        version: of the archive.
        batch_size: most requests of one packed run.
        max_batch_delay_ms: how long TorchServe waits for them.
        response_timeout_s: after it TorchServe restarts the worker.
        llm: further arguments of `LLM`.
    """

    version: str = "1.0"
    batch_size: int = 8
    max_batch_delay_ms: int = 20
    response_timeout_s: int = 600
    llm: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("batch_size", "response_timeout_s"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}: it must be at least 1")
        if self.max_batch_delay_ms < 0:
            raise ConfigError(
                f"max_batch_delay_ms is {self.max_batch_delay_ms}: it must be at least 0"
            )


def write_archive(model: str, out: Path, options: ArchiveOptions, *, include: bool = False) -> Path:
    """Writes a `.mar` for TorchServe; returns where.

    Args:
        model: an alias, a hub id, a folder or a `.gguf` file.
        out: ends in .mar; its stem is the model's name at TorchServe.
        include: put the folder's files into the archive; else it is loaded from where it is.

    Raises:
        ConfigError: a name cannot be used, or there is no folder to include.
    """
    name = out.stem
    if out.suffix != ".mar" or not re.fullmatch(r"[A-Za-z0-9][\w.-]*", name):
        raise ConfigError(f"out is {str(out)!r}: name a file like my-model.mar")
    if include and not Path(model).is_dir():
        raise ConfigError(f"{model!r} is no folder: only a folder's files can be included")
    here = str(Path(model).absolute()) if os.path.exists(model) else model
    load = {"model": None if include else here, "llm": options.llm}
    part = out.with_suffix(".part")
    try:
        with zipfile.ZipFile(part, "w", zipfile.ZIP_STORED) as archive:
            archive.writestr(
                "MAR-INF/MANIFEST.json", json.dumps(_manifest(name, options), indent=2)
            )
            archive.writestr("draftwood_handler.py", _HANDLER)
            archive.writestr("draftwood.json", json.dumps(load, indent=2))
            archive.writestr("model-config.yaml", _config(options))
            for path in sorted(Path(model).rglob("*")) if include else ():
                if path.is_file():
                    archive.write(path, Path("model") / path.relative_to(model))
        os.replace(part, out)
    except OSError as error:
        raise ConfigError(f"{out} cannot be written ({error.strerror})") from error
    finally:
        part.unlink(missing_ok=True)
    return out


def _manifest(name: str, options: ArchiveOptions) -> dict[str, Any]:
    return {
        "createdOn": datetime.now().strftime("%d/%m/%Y %H:%M:%S"),
        "runtime": "python",
        "model": {
            "modelName": name,
            "handler": "draftwood_handler.py",
            "modelVersion": options.version,
            "configFile": "model-config.yaml",
        },
        "archiverVersion": "0.12.0",
    }


def _config(options: ArchiveOptions) -> str:
    """One worker: an engine batches by itself, and a second one would load the weights again."""
    values = {
        "minWorkers": 1,
        "maxWorkers": 1,
        "batchSize": options.batch_size,
        "maxBatchDelay": options.max_batch_delay_ms,
        "responseTimeout": options.response_timeout_s,
    }
    return "".join(f"{key}: {value}\n" for key, value in values.items())


class DraftwoodHandler:
    """What TorchServe calls: `initialize` once, `handle` with every batch."""

    def __init__(self) -> None:
        self._llm: LLM | None = None
        self._runner: BatchRunner | None = None
        self.initialized = False

    def initialize(self, context: Any) -> None:
        """Loads the model that the archive names.

        Args:
            context: TorchServe's, with `system_properties`.
        """
        properties = context.system_properties
        folder = Path(properties["model_dir"])
        load = json.loads((folder / "draftwood.json").read_text(encoding="utf-8"))
        options = dict(load["llm"])
        gpu = properties.get("gpu_id")
        if "device" not in options and gpu is not None:
            options["device"] = f"cuda:{gpu}"
        self._llm = LLM(load["model"] or str(folder / "model"), **options)
        self._runner = BatchRunner(self._llm)
        self.initialized = True

    def handle(self, data: Sequence[dict[str, Any]] | None, context: Any) -> list[Any]:
        """Answers a batch in one packed run.

        Args:
            data: one mapping per request, with its "body" (or "data").
            context: TorchServe's: takes status codes, metrics and pieces of streams.

        Returns:
            One answer per request. A request that streams gets its text in pieces, and here "".
        """
        if not data or self._runner is None:
            return []
        bodies = [row["body"] if "body" in row else row.get("data") for row in data]
        streamed: set[int] = set()

        def send(pieces: Sequence[str]) -> None:
            streamed.update(i for i, piece in enumerate(pieces) if piece)
            _send(pieces, context)

        begin = perf_counter()
        replies = self._runner.answer(bodies, send)
        _count(replies, perf_counter() - begin, context)
        for i, reply in enumerate(replies):
            if reply.status != 200:
                context.set_response_status(code=reply.status, phrase="Bad Request", idx=i)
        return ["" if i in streamed else reply.body for i, reply in enumerate(replies)]

    def close(self) -> None:
        """Lets go of the model."""
        if self._llm is not None:
            self._llm.close()


def _send(pieces: Sequence[str], context: Any) -> None:
    """Sends pieces on; the others of the batch get none."""
    from ts.handler_utils.utils import send_intermediate_predict_response

    send_intermediate_predict_response(
        list(pieces), context.request_ids, "Intermediate Prediction success", 200, context
    )


def _count(replies: Sequence[Reply], seconds: float, context: Any) -> None:
    """TorchServe's metrics: see its metrics.yaml for where they go."""
    metrics = context.metrics
    if metrics is None:
        return
    good = [reply.body["usage"] for reply in replies if reply.status == 200]
    metrics.add_counter("DraftwoodTokens", sum(usage["completion_tokens"] for usage in good))
    metrics.add_counter("DraftwoodCachedTokens", sum(usage["cached_tokens"] for usage in good))
    metrics.add_counter("DraftwoodBatchRequests", len(replies))
    metrics.add_time("DraftwoodBatchTime", seconds * 1000.0)
