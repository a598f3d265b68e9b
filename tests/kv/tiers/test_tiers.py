"""KV that another engine left behind: same texts, fewer rows, in both planes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from draftwood.draft.base import NoDrafter
from draftwood.models.base import Model
from draftwood.sampling import SamplingParams
from tests.redis_server import Redis
from tests.tiny import CountingModel, TinyLLM, distinct, hf_model, random_prompts, tiny_llm

GREEDY = SamplingParams(max_tokens=16, ignore_eos=True)
SAMPLED = GREEDY.but(temperature=0.9, seed=5)
TARGET = CountingModel(hf_model("llama"))
DRAFT = CountingModel(hf_model("llama", seed=40))


def make(*, draft: Model | None = None, **options: Any) -> TinyLLM:
    """An engine as a new process would make it: nothing in RAM."""
    return tiny_llm(TARGET, draft=draft, **{"block_size": 4, "kv_timeout_s": 5.0, **options})


@pytest.fixture(params=["disk", "redis"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """A tier, and the settings that name it."""
    if request.param == "disk":
        yield "disk", {"kv_disk": str(tmp_path)}
    else:
        yield "redis", {"kv_redis": request.getfixturevalue("redis_server").url}


Where = tuple[str, dict[str, Any]]


def plain(prompt: list[int], params: SamplingParams) -> list[int]:
    [text] = tiny_llm(TARGET, drafter="none").run([prompt], params)
    return text


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_prompt_is_restored_in_another_engine(where: Where, params: SamplingParams) -> None:
    tier, settings = where
    [prompt] = random_prompts([43])
    with make(**settings) as first:
        [one] = first.outputs([prompt], params)
    assert list(one.token_ids) == plain(prompt, params)
    assert distinct(one.token_ids) > 3
    assert one.metrics.num_cached_tokens == 0
    with make(**settings) as second:
        TARGET.clear()
        [two] = second.outputs([prompt], params)
        assert TARGET.rows[0] == 3
        [three] = second.outputs([prompt], params)
    assert one.token_ids == two.token_ids == three.token_ids
    assert two.metrics.num_cached_tokens == 40
    assert two.metrics.cached_by_tier == {tier: 40, "ram": 0}
    assert three.metrics.cached_by_tier == {"ram": 40}


def test_both_planes_come_back(where: Where) -> None:
    """A hit that restores only the target's KV makes acceptance collapse unseen, or costs a
    prefill of the draft model."""
    _, settings = where
    [prompt] = random_prompts([81])
    with make(draft=DRAFT, **settings) as first:
        [one] = first.outputs([prompt], GREEDY)
    with make(draft=DRAFT, **settings) as second:
        DRAFT.clear()
        [two] = second.outputs([prompt], GREEDY)
    assert two.token_ids == one.token_ids
    assert two.metrics.num_cached_tokens == 80
    assert DRAFT.rows[0] == 1
    assert one.metrics.num_accepted_tokens > 0
    assert two.metrics.acceptance_rate >= 0.95 * one.metrics.acceptance_rate


def test_a_missing_draft_part_is_computed_and_then_kept(where: Where) -> None:
    _, settings = where
    [prompt] = random_prompts([41])
    with make(drafter="none", **settings) as first:
        [one] = first.outputs([prompt], GREEDY)
    with make(draft=DRAFT, **settings) as second:
        DRAFT.clear()
        [two] = second.outputs([prompt], GREEDY)
        assert DRAFT.rows[0] == 41
    with make(draft=DRAFT, **settings) as third:
        DRAFT.clear()
        [three] = third.outputs([prompt], GREEDY)
        assert DRAFT.rows[0] == 1
    assert one.token_ids == two.token_ids == three.token_ids
    assert two.metrics.num_cached_tokens == three.metrics.num_cached_tokens == 40


def test_the_draft_part_of_another_draft_model_is_not_used(where: Where) -> None:
    _, settings = where
    [prompt] = random_prompts([41])
    other = CountingModel(hf_model("llama", seed=41))
    with make(draft=DRAFT, **settings) as first:
        first.outputs([prompt], GREEDY)
    with make(draft=other, **settings) as second:
        [two] = second.outputs([prompt], GREEDY)
        assert other.rows[0] == 41
        assert two.metrics.num_cached_tokens == 40
        assert list(two.token_ids) == plain(prompt, GREEDY)


@pytest.mark.parametrize("change", ["model", "block_size", "salt"])
def test_what_changes_kv_changes_the_key(where: Where, change: str) -> None:
    _, settings = where
    [prompt] = random_prompts([41])
    with make(**settings) as first:
        first.outputs([prompt], GREEDY.but(cache_salt="a"))
    model: Any = hf_model("llama", seed=3) if change == "model" else TARGET
    size = 8 if change == "block_size" else 4
    salt = "b" if change == "salt" else "a"
    with tiny_llm(model, block_size=size, kv_timeout_s=5.0, **settings) as second:
        params = GREEDY.but(cache_salt=salt)
        [output] = second.outputs([prompt], params)
        assert output.metrics.num_cached_tokens == 0
        [again] = second.outputs([prompt], params)
        assert again.metrics.num_cached_tokens == 40
        assert again.token_ids == output.token_ids


def test_tenants_do_not_share_ram() -> None:
    [prompt] = random_prompts([41])
    llm = make()
    llm.outputs([prompt], GREEDY.but(cache_salt="a"))
    [other] = llm.outputs([prompt], GREEDY)
    [same] = llm.outputs([prompt], GREEDY.but(cache_salt="a"))
    assert (other.metrics.num_cached_tokens, same.metrics.num_cached_tokens) == (0, 40)


def test_evicted_blocks_come_back_from_the_store(where: Where) -> None:
    """A pool too small for all prompts: what RAM gives up is read again, not computed again."""
    tier, settings = where
    prompts = random_prompts([41] * 6)
    with make(num_blocks=30, **settings) as llm:
        texts = [llm.run([prompt], GREEDY)[0] for prompt in prompts]
        assert llm.tiers is not None
        assert llm.tiers.flush()
        outputs = [llm.outputs([prompt], GREEDY)[0] for prompt in prompts]
    assert [list(output.token_ids) for output in outputs] == texts
    assert all(output.metrics.num_cached_tokens == 40 for output in outputs)
    assert sum(output.metrics.cached_by_tier.get(tier, 0) for output in outputs) >= 120
    assert llm.pool.num_free == llm.pool.num_blocks


@pytest.mark.parametrize("drafter", ["random", "bushy", "auto"])
def test_the_hit_rate_does_not_depend_on_speculation(drafter: str) -> None:
    """Rejected nodes take slots for a round; they evict nothing, and nothing of them is cached."""

    def hits(name: str, nodes: int) -> list[int]:
        llm = make(drafter=name, num_blocks=60, max_tree_nodes=nodes)
        prompts = random_prompts([21, 41, 33])
        turns = [prompts[i] for i in (0, 1, 0, 2, 1, 0)]
        return [llm.outputs([turn], GREEDY)[0].metrics.num_cached_tokens for turn in turns]

    cached = hits("none", 0)
    assert cached == [0, 0, 20, 0, 40, 20]
    assert hits(drafter, 24) == cached


def test_no_thread_outlives_the_interpreter(tmp_path: Path) -> None:
    """One in native code at the end would abort the process: nobody calls `close` here."""
    code = """
import sys
from draftwood.sampling import SamplingParams
from tests.tiny import hf_model, random_prompts, tiny_llm
params = SamplingParams(max_tokens=4, ignore_eos=True)
[prompt] = random_prompts([200])
llms = [tiny_llm("llama", block_size=4, kv_disk=sys.argv[1]) for _ in range(3)]
llms[0].outputs([prompt], params)
llms[0].tiers.flush()
for llm in llms[1:]:
    llm.engine.add(prompt, params)
    llm.engine._scheduler._admit()  # the reader has begun
llms[0].outputs([prompt[::-1]], params)  # and the writer has something to do
print("end")
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "end"), done.stderr
    assert "terminate" not in done.stderr
    assert "Exception" not in done.stderr
    with make(kv_disk=str(tmp_path)) as llm:
        [prompt] = random_prompts([200])
        [output] = llm.outputs([prompt[::-1]], GREEDY)
        assert output.metrics.num_cached_tokens == 196, "what was queued is written at the end"


def test_disk_is_filled_from_redis(redis_server: Redis, tmp_path: Path) -> None:
    """What a slower tier had is written to the faster one, and found there by the next process."""
    both = {"kv_disk": str(tmp_path), "kv_redis": redis_server.url}
    [prompt] = random_prompts([41])
    with make(kv_redis=redis_server.url) as first:
        [one] = first.outputs([prompt], GREEDY)
    for tier in ("redis", "disk"):
        with make(**both) as llm:
            [output] = llm.outputs([prompt], GREEDY)
        assert output.token_ids == one.token_ids
        assert output.metrics.cached_by_tier[tier] == 40


def test_a_batch_of_one_prefix_is_fetched_once(where: Where) -> None:
    tier, settings = where
    [prefix] = random_prompts([40])
    prompts = [[*prefix, token] for token in range(6)]
    with make(**settings) as first:
        texts = first.run(prompts, GREEDY)
    with make(**settings) as second:
        outputs = second.outputs(prompts, GREEDY)
        assert second.tiers is not None
        assert second.tiers.counters[tier].num_hits < 6 * 10
    assert [list(output.token_ids) for output in outputs] == texts
    assert all(output.metrics.num_cached_tokens == 40 for output in outputs)


def test_an_engine_that_is_closed_gives_its_prefixes_back() -> None:
    """They stayed in the shared pool for as long as the process lived."""
    llm = make(drafter="none")
    [prompt] = random_prompts([41])
    llm.outputs([prompt], GREEDY)
    before = llm.pool.num_free
    engine = llm.make_engine(NoDrafter())
    seq = engine.add(prompt, GREEDY)
    while not seq.finished:
        engine.step()
    running = engine.add(prompt, GREEDY)
    engine.step()
    assert llm.pool.num_free < before
    engine.close()
    assert running.finish_reason == "abort"
    assert llm.pool.num_free == before
    llm.close()
    assert llm.pool.num_free == llm.pool.num_blocks
