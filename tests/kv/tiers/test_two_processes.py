"""A prompt computed in one process is restored in another, for the draft model too."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.redis_server import Redis
from tests.tiny import save_tiny

# The draft model is the target with other last bits: it is often right, and knows the prompt by
# its own KV alone.
SCRIPT = """
import json, sys
from draftwood import EngineConfig, LLM, SamplingParams
target, draft, redis, text = sys.argv[1:]
config = EngineConfig(adaptive=False, max_tree_nodes=6, kv_timeout_s=5.0)
with LLM(target, draft=draft, drafter="model", quantization="none", draft_quantization="none",
         kv_redis=redis, config=config) as llm:
    [output] = llm.generate(text, SamplingParams(max_tokens=48, ignore_eos=True))
    metrics = output.metrics
    print(json.dumps({
        "tokens": list(output.token_ids),
        "cached": metrics.cached_by_tier.get("redis", 0),
        "prompt": len(output.prompt_token_ids),
        "acceptance": metrics.acceptance_rate,
        "drafted": metrics.num_draft_tokens,
    }))
"""
TEXT = "the quick brown fox jumps over the lazy dog and then " * 6


def run(target: Path, draft: Path, redis: str) -> dict[str, Any]:
    """What a process of its own says."""
    command = [sys.executable, "-c", SCRIPT, str(target), str(draft), redis, TEXT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout)
    return said


def perturb(folder: Path) -> None:
    """Moves every weight a little."""
    import torch
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    torch.manual_seed(0)
    weights = {
        name: w + 0.02 * w.std() * torch.randn_like(w) for name, w in load_file(file).items()
    }
    save_file(weights, file, {"format": "pt"})


def test_acceptance_is_as_good_in_the_second(tmp_path: Path, redis_server: Redis) -> None:
    target, draft = save_tiny(tmp_path / "target"), save_tiny(tmp_path / "draft")
    perturb(draft)
    first = run(target, draft, redis_server.url)
    second = run(target, draft, redis_server.url)
    assert first["cached"] == 0
    assert second["cached"] >= first["prompt"] - 16 - 1
    assert second["tokens"] == first["tokens"]
    assert first["drafted"] > 0
    assert first["acceptance"] > 0.1  # a tree has several nodes for each token
    assert second["acceptance"] >= 0.95 * first["acceptance"]
