"""What a forward costs on this machine, by rows and context.

Measured once at the start (under three seconds, a draft model's included), kept in the cache for
this model, dtype, number of threads and machine, and corrected by every forward that runs.
"""

from __future__ import annotations

import hashlib
import json
import math
import operator
import os
import platform
from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from draftwood.attention import Work, pack
from draftwood.cache import cache_dir
from draftwood.kv import BlockPool, Lease, Plane
from draftwood.models.base import Model
from draftwood.tree.shape import CostTable

_SIZES = (1, 2, 4, 8, 16, 32, 64)
_ORDER = (1, 16, 4, 8, 32, 2, 64)  # a slow machine gets through the first few only
_FAR_CONTEXT = 1024
_BUDGET_S = 0.85  # for each of the two contexts
_DRAFT_BUDGET_S = 0.3
_VERSION = 2
_FORGET = 0.98  # a round later a size counts as so much of a seen one
_FAINT = 0.1


@dataclass(slots=True)
class CostModel:
    """Seconds of a forward.

    Attributes:
        near: by rows, without context.
        far: by rows, at `far_context` tokens of context.
        far_context: context of `far`; 0 if only `near` was measured.
        pace: how much slower the machine is now than when it was measured.
        factors: corrections at the rows of `near`, from rounds that ran; between them they are
            interpolated, so that what one size taught holds for its neighbours. Over the sizes seen
            of late they are 1 on average.
    """

    near: CostTable
    far: CostTable
    far_context: int
    pace: float = 1.0
    factors: list[float] = field(default_factory=list)
    _seen: list[float] = field(default_factory=list, compare=False)

    def __post_init__(self) -> None:
        self.factors = self.factors or [1.0] * len(self.near.rows)
        self._seen = [0.0] * len(self.near.rows)

    def at(self, context: float) -> Callable[[int], float]:
        """Seconds by number of rows at a context of so many tokens."""
        share = context / self.far_context if self.far_context else 0.0

        def seconds(num_rows: int) -> float:
            near, far = self.near(num_rows), self.far(num_rows)
            plain = near + max(far - near, 0.0) * share
            return plain * self.pace * self._factor(num_rows)

        return seconds

    def observe(self, num_rows: int, context: float, seconds: float) -> None:
        """Learns from one forward.

        A machine that is slower altogether moves the pace, quickly; one number of rows that costs
        more than its neighbours let expect moves that number's factor, slowly. Outliers (another
        program had the processor) count little.
        """
        ratio = min(max(seconds / self.at(context)(num_rows), 0.5), 2.0)
        self.pace *= ratio**0.1
        self._seen = [_FORGET * seen for seen in self._seen]
        for i, weight in self._knots(num_rows):
            factor = self.factors[i] * ratio ** (0.05 * weight)
            self.factors[i] = min(max(factor, 0.5), 3.0)
            self._seen[i] += weight
        self._center()

    def _center(self) -> None:
        """Gives the pace what the sizes seen of late have in common; sizes not seen go with it.

        Under steady load one size is nearly all that is seen. A machine that is slower than when it
        was measured would make that size dear by itself, and a few nodes more seem cheap.
        """
        logs = [math.log(factor) for factor in self.factors]
        common = sum(map(operator.mul, self._seen, logs)) / sum(self._seen)
        self.pace *= math.exp(common)
        for i, seen in enumerate(self._seen):
            self.factors[i] *= math.exp(-common * seen / (seen + _FAINT))

    def _factor(self, num_rows: int) -> float:
        return sum(self.factors[i] * weight for i, weight in self._knots(num_rows))

    def _knots(self, num_rows: int) -> list[tuple[int, float]]:
        """Indices into `near.rows` on both sides of `num_rows`, with weights that add up to 1."""
        rows = self.near.rows
        right = bisect_left(rows, num_rows)
        if right == len(rows):
            return [(right - 1, 1.0)]
        if right == 0 or rows[right] == num_rows:
            return [(right, 1.0)]
        share = (num_rows - rows[right - 1]) / (rows[right] - rows[right - 1])
        return [(right - 1, 1 - share), (right, share)]


def cost_model(model: Model, pool: BlockPool, *, draft: bool = False) -> CostModel:
    """The cached cost model of `model` on this machine, or a fresh one.

    Args:
        model: the target, or the draft model.
        pool: with room for a few forwards.
        draft: whether it is the draft model, whose KV lies in the pool's draft plane, if it has one
            (else in the only one). Its forwards are short, and so is the time they are given.
    """
    path = _path(model)
    known = _read(path)
    if known is not None:
        return known
    plane = pool.draft if draft and pool.draft is not None else pool.target
    fresh = measure(model, pool, plane, _DRAFT_BUDGET_S if draft else _BUDGET_S)
    if len(fresh.near.rows) == len(_SIZES):  # else the machine was too busy to be judged
        _write(path, fresh)
    return fresh


def measure(model: Model, pool: BlockPool, plane: Plane, budget_s: float) -> CostModel:
    """Times forwards of growing numbers of rows at two contexts, about `budget_s` for each."""

    def forward(context: int) -> Callable[[int], float]:
        return lambda size: _time_forward(model, pool, plane, context, size)

    room = (pool.num_free - 1) * pool.block_size
    near = _table(forward(0), _ORDER, budget_s, room)
    far_context = min(_FAR_CONTEXT, model.spec.max_model_len - max(_SIZES), room - max(_SIZES))
    if far_context < 64:
        return CostModel(near, near, 0)
    sizes = [size for size in _ORDER if size in near.rows]
    far = _table(forward(far_context), sizes, budget_s, room)
    return CostModel(near, far, far_context)


def _time_forward(model: Model, pool: BlockPool, plane: Plane, context: int, size: int) -> float:
    """Seconds of one forward; what the context's slots hold does not matter for its time."""
    lease = Lease(pool)
    try:
        lease.reserve(context + size)
        batch = pack([Work(lease, context, [0] * size, None, range(size))], pool.device)
        begin = perf_counter()
        model.forward(batch, plane)
        if pool.device.type == "cuda":
            torch.cuda.synchronize(pool.device)
        return perf_counter() - begin
    finally:
        lease.close()


def _table(
    forward: Callable[[int], float], sizes: Sequence[int], budget_s: float, room: int
) -> CostTable:
    """Times the sizes in their order until the time is used up.

    More rows never cost less: a faster reading of a larger size is noise of the smaller one. A
    table that was cut short is continued as if twice the rows cost twice as much.
    """
    forward(sizes[0])  # the first run pays for lazy initialisation
    measured: dict[int, float] = {}
    spent = 0.0
    for size in sizes:
        for _ in range(2):
            if size <= room and (not measured or spent <= budget_s):
                took = forward(size)
                spent += took
                measured[size] = min(measured.get(size, took), took)
    rows = sorted(measured)
    seconds = [measured[size] for size in rows]
    for i in range(len(seconds) - 1, 0, -1):
        seconds[i - 1] = min(seconds[i - 1], seconds[i])
    if rows[-1] < max(sizes):
        rows.append(2 * rows[-1])
        seconds.append(2 * seconds[-1])
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
