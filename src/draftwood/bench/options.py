"""Options that commands of `draftwood bench` share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Model = Annotated[
    str, typer.Argument(help="Packaged alias, hub id, folder or .gguf file.", show_default=False)
]
Dtype = Annotated[str | None, typer.Option(help="float32, bfloat16 or float16.")]
Device = Annotated[str | None, typer.Option(help="cpu or cuda.")]
Threads = Annotated[int | None, typer.Option(help="CPU threads.", show_default="one for each core")]
Quantization = Annotated[
    str | None,
    typer.Option(help="int8, int4 or none.", show_default="int8 for large models on a CPU"),
]
Out = Annotated[Path | None, typer.Option(help="Write JSON lines to this file.")]
