"""From a GGUF file to a folder that transformers loads, once and fast.

transformers' own reader takes 34 s to 150 s for the packaged models, each time. This one unpacks
the tensors piece by piece on a few threads, straight into a safetensors file whose header is known
beforehand, so that memory holds a few pieces and never a model. The values are exactly those that
transformers would load: both unpack with gguf.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from gguf.quants import dequantize

from draftwood import cache
from draftwood.errors import ModelError
from draftwood.models.gguf_file import GgufFile
from draftwood.models.gguf_model import (
    Parameter,
    architecture,
    config_values,
    end_token_ids,
    parameters,
)
from draftwood.models.gguf_tokenizer import write_tokenizer
from draftwood.models.progress import Progress, silent

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig

    Floats = npt.NDArray[np.float32]


_FLOAT_BYTES = 4
_PIECE_BYTES = 16 << 20  # unpacked; large enough for numpy, small enough for the memory
_NUM_THREADS = min(4, os.cpu_count() or 1)
_SMALL_FILES_BYTES = 64 << 20  # more than config and tokenizer take


def load_config(path: Path) -> PreTrainedConfig:
    """The transformers config of a GGUF file, without marks of quantisation.

    Raises ModelError if the file is damaged or its architecture is not supported.
    """
    return _config(GgufFile.open(path))


def iter_tensors(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter of a GGUF file: its name in transformers and its float32 values.

    One tensor is in memory at a time. Raises ModelError like `convert`.
    """
    import torch

    file = GgufFile.open(path)
    for parameter in _parameters(file, _config(file)):
        values = torch.empty(parameter.tensor.shape)
        flat, start = values.view(-1).numpy(), 0
        for piece in _unpacked([parameter], file):
            flat[start : start + piece.size] = piece
            start += piece.size
        yield parameter.name, values


def convert(path: Path, target: Path, name: str, progress: Progress = silent) -> Path:
    """Make the folder `target` from the GGUF file `path`; returns `target`.

    Writes float32 model.safetensors, config.json, generation_config.json and the tokenizer, all or
    nothing. Call it under `cache.locked(target.name)`. `name` is for messages. Raises ModelError
    if the file is damaged or not supported, CapacityError if the disk is too small.
    """
    file = GgufFile.open(path)
    config = _config(file)
    plan = _parameters(file, config)
    need_bytes = sum(map(_num_bytes, plan)) + _SMALL_FILES_BYTES
    with cache.staging(target.name, name, need_bytes) as folder:
        made = folder / "model"
        made.mkdir()
        write_tokenizer(file, made)
        _write_configs(file, config, made)
        _write_weights(file, plan, made / "model.safetensors", f"unpacking {name}", progress)
        return cache.publish(made, target)


def write_small_files(path: Path, folder: Path) -> PreTrainedConfig:
    """Write config, generation config and tokenizer of a GGUF file; returns the config.

    Raises ModelError like `convert`.
    """
    file = GgufFile.open(path)
    config = _config(file)
    _parameters(file, config)
    write_tokenizer(file, folder)
    _write_configs(file, config, folder)
    return config


def _config(file: GgufFile) -> PreTrainedConfig:
    from transformers import AutoConfig

    model_type = architecture(file).model_type
    try:
        return AutoConfig.for_model(model_type, dtype="float32", **config_values(file))
    except (ValueError, TypeError, ZeroDivisionError) as error:
        raise ModelError(f"{file.path}: its metadata describe no model: {error}") from error


def _parameters(file: GgufFile, config: PreTrainedConfig) -> list[Parameter]:
    """The plan of a conversion; also sets `config.architectures`. Nothing large is read."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    config.architectures = [type(model).__name__]
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    if config.tie_word_embeddings:
        del shapes["lm_head.weight"]
    plan = parameters(file, shapes)
    _check_quantizations(file, plan)
    return plan


def _check_quantizations(file: GgufFile, plan: list[Parameter]) -> None:
    """Unpack one row of each kind: what gguf cannot unpack is an error before the long work."""
    for tensor in {p.tensor.quantization: p.tensor for p in plan}.values():
        try:
            dequantize(file.packed_rows(tensor)[:1], tensor.quantization)
        except NotImplementedError as error:
            raise ModelError(
                f"{file.path}: tensor {tensor.name} has the quantisation "
                f"{tensor.quantization.name}, which cannot be unpacked"
            ) from error


def _write_configs(file: GgufFile, config: PreTrainedConfig, folder: Path) -> None:
    config.save_pretrained(folder)
    generation = {
        "bos_token_id": config.bos_token_id,
        "eos_token_id": end_token_ids(file) or None,
        "pad_token_id": config.pad_token_id,
    }
    known = {key: value for key, value in generation.items() if value is not None}
    (folder / "generation_config.json").write_text(json.dumps(known, indent=2) + "\n")


def _num_bytes(parameter: Parameter) -> int:
    return prod(parameter.tensor.shape) * _FLOAT_BYTES


def _write_weights(
    file: GgufFile, plan: list[Parameter], path: Path, stage: str, progress: Progress
) -> None:
    done, total = 0, sum(map(_num_bytes, plan))
    with open(path, "wb") as out:
        out.write(_safetensors_header(plan))
        for piece in _unpacked(plan, file):
            progress(stage, done, total)
            out.write(piece.data)
            done += piece.nbytes
    progress(stage, done, total)


def _safetensors_header(plan: Iterable[Parameter]) -> bytes:
    """The start of a safetensors file with these float32 parameters one after the other.

    safetensors' own `save_file` wants all tensors in memory at once.
    Format: https://huggingface.co/docs/safetensors
    """
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for parameter in plan:
        end = start + _num_bytes(parameter)
        shape = list(parameter.tensor.shape)
        table[parameter.name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
        start = end
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # keeps the tensors aligned
    return len(text).to_bytes(8, "little") + text


def _unpacked(plan: Iterable[Parameter], file: GgufFile) -> Iterator[Floats]:
    """The values of all parameters in order, as flat pieces; a few are unpacked ahead."""
    pending: deque[Future[Floats]] = deque()
    with ThreadPoolExecutor(_NUM_THREADS, "draftwood-unpack") as pool:
        try:
            for work in _pieces(plan, file):
                pending.append(pool.submit(work))
                if len(pending) > _NUM_THREADS:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)


def _pieces(plan: Iterable[Parameter], file: GgufFile) -> Iterator[Callable[[], Floats]]:
    for parameter in plan:
        rows = file.packed_rows(parameter.tensor)
        step = _rows_per_piece(parameter)
        for start in range(0, len(rows), step):
            yield _unpack_later(parameter, rows[start : start + step])


def _rows_per_piece(parameter: Parameter) -> int:
    shape = parameter.tensor.shape
    num_rows = max(1, _PIECE_BYTES // (shape[-1] * _FLOAT_BYTES))
    # Rows of paired heads change places, so such a tensor (never a large one) is one piece.
    return prod(shape) if parameter.num_paired_heads else num_rows


def _unpack_later(parameter: Parameter, rows: npt.NDArray[np.uint8]) -> Callable[[], Floats]:
    def unpack() -> Floats:
        with np.errstate(all="ignore"):  # a damaged scale is the model's affair, not a warning
            values = dequantize(rows, parameter.tensor.quantization)
        if parameter.num_paired_heads:
            values = _sort_rotary_pairs(values, parameter)
        return np.ascontiguousarray(values, dtype=np.float32).ravel()

    return unpack


def _sort_rotary_pairs(values: Floats, parameter: Parameter) -> Floats:
    """Undo llama.cpp's permutation of q and k: rows (0, 1), (2, 3), ... to halves (0, 2, ...), (1,
    3, ...) within each head, as transformers' rotary embedding wants them."""
    rows = values.reshape(parameter.tensor.shape)
    pairs = rows.reshape(parameter.num_paired_heads, -1, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2)
