"""Many requests with common beginnings, aborts and evictions, all tiers small: nothing leaks."""

from __future__ import annotations

import os
import random
import threading
from pathlib import Path

import pytest

from draftwood.engine.sequence import Sequence
from draftwood.models.base import Model
from draftwood.sampling import SamplingParams
from tests.redis_server import Redis
from tests.tiny import hf_model, random_prompts, run_until, tiny_llm
from tests.toys import ToyModel, random_law

TOY = ToyModel(random_law(8, seed=1), 8)
THOROUGH = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"
COUNTS = {"toy": 2000, "two planes": 2000} if THOROUGH else {"toy": 300, "two planes": 30}
GROWTH = 24 << 20  # bytes over the second half: what is kept of each request here, and no KV


def resident_bytes() -> int:
    """Of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("kind", ["toy", "two planes"])
def test_block_counts_return_exactly(kind: str, tmp_path: Path, redis_server: Redis) -> None:
    """Each text is the plain one, whatever was cached where, and every block comes back."""
    rng = random.Random(kind)
    threads = threading.active_count()
    target: Model = TOY if kind == "toy" else hf_model("llama", vocab_size=8)
    draft = None if kind == "toy" else hf_model("llama", vocab_size=8, seed=40)
    # fmt: off
    llm = tiny_llm(
        target, draft=draft, vocab_size=8, num_blocks=26, block_size=4, max_num_seqs=3,
        max_batch_tokens=24, max_tree_nodes=6, kv_disk=str(tmp_path), kv_redis=redis_server.url,
        kv_disk_bytes=60_000, kv_timeout_s=5.0,
    )
    # fmt: on
    prefixes = random_prompts([16, 20, 24, 28], vocab_size=8, seed=3)
    done: list[Sequence] = []
    live: list[Sequence] = []
    half, memory = COUNTS[kind] // 2, 0
    for i in range(COUNTS[kind]):
        if i == half:
            memory = resident_bytes()
        prompt = rng.choice(prefixes)[: rng.randrange(4, 29)]
        prompt = prompt + [rng.randrange(8) for _ in range(rng.randrange(1, 6))]
        params = SamplingParams(
            max_tokens=rng.randrange(1, 12),
            temperature=rng.choice((0.0, 1.0)),
            seed=1,
            ignore_eos=True,
            cache_salt=rng.choice((None, "tenant")),
        )
        live.append(llm.engine.add(prompt, params))
        for _ in range(rng.randrange(4)):
            llm.engine.step()
            llm.pool.check()
        if rng.random() < 0.2:
            llm.engine.abort(live.pop(rng.randrange(len(live))))
        if rng.random() < 0.1:
            llm.engine.prefix.clear()
        done += [seq for seq in live if seq.finished]
        live = [seq for seq in live if not seq.finished]
    run_until(llm, live)
    done += live
    assert resident_bytes() - memory < GROWTH
    assert llm.tiers is not None
    hits = {name: one.num_hits for name, one in llm.tiers.counters.items()}
    llm.close()
    llm.pool.check()
    assert llm.pool.num_free == llm.pool.num_blocks
    assert threading.active_count() == threads
    assert hits["disk"] > 0
    assert sum(one.num_failures for one in llm.tiers.counters.values()) == 0
    plain = tiny_llm(target, drafter="none", vocab_size=8)
    for seq in done:
        [text] = plain.run([seq.tokens[: seq.num_prompt_tokens]], seq.params)
        plain.engine.prefix.clear()
        assert text == seq.output_ids
