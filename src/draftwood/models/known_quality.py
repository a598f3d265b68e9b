"""What quantisation cost the models whose loss was measured.

The packaged models' figures are those of `benchmarks/records/quality-*.jsonl`; `draftwood bench
quality` adds others to the cache.
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from draftwood.cache import cache_dir
from draftwood.models.base import ModelSpec
from draftwood.models.formats import QUANTISED_VERSION


@dataclass(frozen=True, slots=True)
class KnownQuality:
    """The worst of the texts that were read.

    Attributes:
        divergence: mean KL in nats from float32's distribution.
        perplexity_change: relative; 0.01 is one per cent worse.
    """

    divergence: float
    perplexity_change: float


# By name, form and version of that form.
_PACKAGED = {
    ("smollm2-135m", "int8", 2): KnownQuality(0.0038, 0.0069),
    ("qwen2.5-coder-0.5b", "int8", 2): KnownQuality(0.0019, -0.0049),
    ("qwen2.5-coder-1.5b", "int8", 2): KnownQuality(0.0026, -0.0018),
    ("smollm2-135m", "int4", 1): KnownQuality(0.61, 0.81),
    ("qwen2.5-coder-0.5b", "int4", 1): KnownQuality(0.19, 0.29),
}


def quality_of(spec: ModelSpec) -> KnownQuality | None:
    """What is known of a quantised model; None for nothing, and for float weights."""
    if spec.quantization == "none":
        return None
    try:
        return KnownQuality(**json.loads(_path(spec).read_text()))
    except (OSError, ValueError, TypeError):
        version = next((v for b, v in QUANTISED_VERSION.items() if b == spec.quantization), 0)
        return _PACKAGED.get((spec.name, spec.quantization, version))


def remember(spec: ModelSpec, quality: KnownQuality) -> None:
    """Keeps a measurement in the cache; without a writable cache it is lost, nothing else."""
    path = _path(spec)
    draft = path.with_suffix(f".{os.getpid()}")
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(json.dumps(asdict(quality)))
        os.replace(draft, path)


def _path(spec: ModelSpec) -> Path:
    digest = hashlib.sha256(spec.fingerprint.encode()).hexdigest()[:24]
    return cache_dir() / "quality" / f"{digest}.json"
