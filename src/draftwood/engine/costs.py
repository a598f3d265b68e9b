"""What a forward costs on this machine, by rows and context.

Measured once at the start (under three seconds), kept in the cache for this model, dtype, number of
threads and machine, and corrected by every round that runs.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from draftwood.attention import Work, pack
from draftwood.kv import BlockPool, Lease
from draftwood.models.base import Model
from draftwood.models.cache import cache_dir
from draftwood.tree.shape import CostTable

_SIZES = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_FAR_CONTEXT = 1024
_BUDGET_S = 1.2  # for each of the two contexts
_VERSION = 1


@dataclass(slots=True)
class CostModel:
    """Seconds of a forward.

    Attributes:
        near: by rows, without context.
        far: by rows, at `far_context` tokens of context.
        far_context: context of `far`; 0 if only `near` was measured.
        pace: how much slower the machine is now than when it was measured.
        factors: corrections by number of rows, from rounds that ran.
    """

    near: CostTable
    far: CostTable
    far_context: int
    pace: float = 1.0
    factors: dict[int, float] = field(default_factory=dict)

    def at(self, context: float) -> Callable[[int], float]:
        """Seconds by number of rows at a context of so many tokens."""
        share = context / self.far_context if self.far_context else 0.0

        def seconds(num_rows: int) -> float:
            near, far = self.near(num_rows), self.far(num_rows)
            plain = near + max(far - near, 0.0) * share
            return plain * self.pace * self.factors.get(num_rows, 1.0)

        return seconds

    def observe(self, num_rows: int, context: float, seconds: float) -> None:
        """Learns from one forward.

        A machine that is slower altogether moves the pace, quickly; one number of rows that costs
        more than its neighbours let expect moves that number's factor, slowly. Outliers (another
        program had the processor) count little.
        """
        ratio = min(max(seconds / self.at(context)(num_rows), 0.5), 2.0)
        self.pace *= ratio**0.1
        factor = self.factors.get(num_rows, 1.0) * ratio**0.02
        self.factors[num_rows] = min(max(factor, 0.7), 1.5)


def cost_model(model: Model, pool: BlockPool) -> CostModel:
    """The cached cost model of `model` on this machine, or a fresh one."""
    path = _path(model)
    known = _read(path)
    if known is not None:
        return known
    fresh = measure(model, pool)
    _write(path, fresh)
    return fresh


def measure(model: Model, pool: BlockPool) -> CostModel:
    """Times forwards of growing numbers of rows at two contexts."""
    room = (pool.num_free - 1) * pool.block_size
    near = _table(lambda size: _time_forward(model, pool, 0, size), _SIZES, _BUDGET_S, room)
    far_context = min(_FAR_CONTEXT, model.spec.max_model_len - max(_SIZES), room - max(_SIZES))
    if far_context < 64:
        return CostModel(near, near, 0)
    sizes = [size for size in near.rows if size in (1, 4, 8, 16, 32)]
    far = _table(lambda size: _time_forward(model, pool, far_context, size), sizes, _BUDGET_S, room)
    return CostModel(near, far, far_context)


def _time_forward(model: Model, pool: BlockPool, context: int, size: int) -> float:
    """Seconds of one forward; what the context's slots hold does not matter for its time."""
    lease = Lease(pool)
    try:
        lease.reserve(context + size)
        batch = pack([Work(lease, context, [0] * size, None, range(size))], pool.device)
        begin = perf_counter()
        model.forward(batch, pool.target)
        if pool.device.type == "cuda":
            torch.cuda.synchronize(pool.device)
        return perf_counter() - begin
    finally:
        lease.close()


def _table(
    forward: Callable[[int], float], sizes: Sequence[int], budget_s: float, room: int
) -> CostTable:
    """Times growing sizes until the time is used up.

    More rows never cost less: a faster reading of a larger size is noise of the smaller one.
    """
    forward(sizes[0])  # the first run pays for lazy initialisation
    rows: list[int] = []
    seconds: list[float] = []
    spent = 0.0
    for size in sizes:
        if size > room or spent + 2 * (seconds[-1] if seconds else 0) > budget_s:
            break
        times = [forward(size) for _ in range(3 if spent < budget_s / 4 else 2)]
        spent += sum(times)
        rows.append(size)
        seconds.append(min(times))
    for i in range(len(seconds) - 1, 0, -1):
        seconds[i - 1] = min(seconds[i - 1], seconds[i])
    return CostTable(tuple(rows), tuple(seconds))


def _path(model: Model) -> Path:
    spec = model.spec
    machine = platform.processor() or platform.machine()
    if spec.device.type == "cuda":
        machine = torch.cuda.get_device_name(spec.device)
    key = [
        _VERSION,
        spec.fingerprint,
        spec.quantization,
        str(spec.dtype),
        torch.get_num_threads(),
        os.cpu_count(),
        platform.node(),
        machine,
        torch.__version__,
    ]
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:24]
    return cache_dir() / "costs" / f"{digest}.json"


def _read(path: Path) -> CostModel | None:
    try:
        values = json.loads(path.read_text())
        near, far = (_as_table(values[name]) for name in ("near", "far"))
        return CostModel(near, far, int(values["far_context"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _as_table(values: dict[str, Any]) -> CostTable:
    return CostTable(tuple(values["rows"]), tuple(values["seconds"]))


def _write(path: Path, model: CostModel) -> None:
    values = {"near": asdict(model.near), "far": asdict(model.far)}
    draft = path.with_suffix(f".{os.getpid()}")
    with suppress(OSError):  # without it the next start measures again, nothing else
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(json.dumps({**values, "far_context": model.far_context}))
        os.replace(draft, path)
