"""Requests that go on in another process: same texts, no prompt read again, nothing lost."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from draftwood.engine.checkpoint import (
    Checkpoint,
    CheckpointStore,
    CheckpointWriter,
    Maker,
    Offset,
    SavedRequest,
)
from draftwood.errors import CheckpointError, ConfigError
from draftwood.llm import LLM, Delta, RequestOutput
from draftwood.models.base import Model
from draftwood.sampling import SamplingParams
from draftwood.text import Tokenizer
from tests.tiny import (
    CountingModel,
    TinyLLM,
    bpe_backend,
    hf_model,
    random_prompts,
    save_tiny,
    tiny_llm,
)

GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)
SAMPLED = GREEDY.but(temperature=0.9, seed=5)
TARGET = CountingModel(hf_model("llama"))
PROMPTS = random_prompts([43, 9, 30])


class _Crash(BaseException):
    """Where a process ends."""


def make(folder: Path, *, model: Model = TARGET, **options: Any) -> TinyLLM:
    """An LLM as a new process would make it, with checkpoints in `folder`."""
    defaults = {"block_size": 4, "kv_timeout_s": 5.0, "kv_disk": str(folder / "kv")}
    llm = tiny_llm(model, **{**defaults, **options})
    llm.checkpoints = CheckpointWriter(folder, Maker.of(llm.model.spec), every_s=1000.0)
    llm.checkpoints.observe(llm.engine, llm.tiers)
    return llm


def crash(llm: TinyLLM) -> None:
    """What SIGKILL leaves behind: no farewell, the lock is free."""
    assert llm.checkpoints is not None
    llm.checkpoints._store.close()
    llm.checkpoints._engine = None
    if llm.tiers is not None:
        llm.tiers.flush()


def begin(
    llm: TinyLLM, prompts: Sequence[list[int]], params: Sequence[SamplingParams], rounds: int
) -> None:
    """Runs requests for some rounds, saves them, and crashes a little later."""
    seqs = llm._add_all(prompts, params)
    for _ in range(rounds):
        llm.engine.step()
    assert llm.checkpoints is not None
    assert llm.checkpoints.save()
    for _ in range(2):
        if llm.engine.has_work:
            llm.engine.step()
    assert seqs
    crash(llm)


def core(output: RequestOutput) -> Any:
    """What must be the same: all but ids, seeds and times."""
    others = tuple(core(other) for other in output.alternatives)
    return (
        output.text,
        output.token_ids,
        output.finish_reason,
        output.stop_reason,
        output.logprobs and [(one.token, one.rank) for one in output.logprobs],
        output.prompt_logprobs and [one and one.token for one in output.prompt_logprobs],
        output.score,
        others,
    )


def check(
    folder: Path,
    prompts: Sequence[list[int]],
    params: Sequence[SamplingParams],
    *,
    rounds: int,
    **options: Any,
) -> list[RequestOutput]:
    """Saved after some rounds, resumed by another engine: as if nothing had happened."""
    whole = tiny_llm(TARGET, **{"block_size": 4, **options}).generate(list(prompts), list(params))
    begin(make(folder, **options), prompts, params, rounds)
    with make(folder, **options) as llm:
        outputs = llm.resume()
        llm.pool.check()
        assert llm.checkpoints is not None
        assert llm.resume() == []
    assert [core(output) for output in outputs] == [core(output) for output in whole]
    assert [o.prompt_token_ids for o in outputs] == [o.prompt_token_ids for o in whole]
    return outputs


@pytest.mark.parametrize("rounds", [0, 1, 4, 9])
@pytest.mark.parametrize("drafter", ["auto", "none", "random"])
def test_texts_are_those_of_an_undisturbed_run(tmp_path: Path, rounds: int, drafter: str) -> None:
    params = [GREEDY, SAMPLED, SAMPLED.but(seed=6, repetition_penalty=1.2)]
    check(tmp_path, PROMPTS, params, rounds=rounds, drafter=drafter)


def test_the_prompt_is_not_read_again(tmp_path: Path) -> None:
    """Its KV is on disk: only the part of the last block is computed again."""
    begin(make(tmp_path, drafter="none"), PROMPTS[:1], [GREEDY], 6)
    with make(tmp_path, drafter="none") as llm:
        TARGET.clear()
        [output] = llm.resume()
    assert output.metrics.num_cached_tokens == 43
    assert output.metrics.num_resumed_tokens == 6
    assert output.metrics.cached_by_tier["disk"] == 43
    assert TARGET.rows[0] <= 4


def test_both_planes_go_on(tmp_path: Path) -> None:
    draft = CountingModel(hf_model("llama", seed=40))
    begin(make(tmp_path, draft=draft), PROMPTS[:1], [GREEDY], 3)
    with make(tmp_path, draft=draft) as llm:
        draft.clear()
        llm.resume()
    assert max(draft.rows) < 20


def test_logprobs_stops_and_siblings(tmp_path: Path) -> None:
    params = [
        GREEDY.but(logprobs=2, prompt_logprobs=1),
        SAMPLED.but(n=3),
        SAMPLED.but(stop="zz", stop_token_ids=(3,), min_tokens=8, bad_words=("b",)),
    ]
    outputs = check(tmp_path, PROMPTS, params, rounds=5)
    assert len(outputs[1].alternatives) == 2
    assert outputs[0].logprobs is not None
    assert len(outputs[0].logprobs) == 24


def test_beams_begin_anew(tmp_path: Path) -> None:
    params = [GREEDY.but(num_beams=3, num_return_sequences=2), GREEDY]
    check(tmp_path, PROMPTS[:2], params, rounds=7)


def test_what_has_ended_is_kept_until_it_is_fetched(tmp_path: Path) -> None:
    """It has reached nobody: after a crash its reader asks again, and it is not computed twice."""
    params = [GREEDY.but(max_tokens=2), GREEDY.but(num_beams=2, max_tokens=3), GREEDY]
    outputs = check(tmp_path, PROMPTS, params, rounds=12)
    assert outputs[0].finish_reason == "length"
    assert outputs[1].score is not None


def test_bias_with_infinities_and_a_chosen_name(tmp_path: Path) -> None:
    params = SAMPLED.but(logit_bias={3: float("-inf"), 4: 2.5}, cache_salt="a", top_k=5)
    llm = make(tmp_path)
    seq = llm.engine.add(PROMPTS[0], params, "mine")
    llm.engine.step()
    assert llm.checkpoints is not None
    llm.checkpoints.save()
    crash(llm)
    with make(tmp_path) as other:
        assert other.checkpoints is not None
        [back] = other.checkpoints.resume(["mine"])
        assert back.request_id == "mine"
        assert back.params.logit_bias == params.logit_bias
        assert back.params == params
        assert back.tokens == seq.tokens


def test_structured_output_goes_on(tmp_path: Path) -> None:
    pytest.importorskip("llguidance")
    folder, model = tmp_path / "c", str(save_tiny(tmp_path / "m"))
    form = {"regex": r"[a-f]{3}-[0-9]{2}(x|yz){4}"}
    params = SamplingParams(max_tokens=60, temperature=1.0, seed=3, structured=form)
    with LLM(model) as llm:
        [whole] = llm.generate("a tree", params)
    stopped = LLM(model, checkpoint=folder)
    stopped.engine.observers.append(_Fuse(3))
    with pytest.raises(_Crash):
        stopped.generate("a tree", params)
    stopped.close()
    with LLM(model, checkpoint=folder) as llm:
        [output] = llm.resume()
    assert 0 < output.metrics.num_resumed_tokens < len(output.token_ids)
    assert core(output) == core(whole)


class _Fuse:
    """Ends a run after so many rounds."""

    def __init__(self, rounds: int) -> None:
        self._left = rounds

    def on_round(self, round_: object) -> None:
        self._left -= 1
        if self._left == 0:
            raise _Crash


def test_an_interrupted_generate_goes_on_in_the_same_process(tmp_path: Path) -> None:
    whole = tiny_llm(TARGET, block_size=4).generate(PROMPTS, SAMPLED)
    with make(tmp_path) as llm:
        llm.engine.observers.append(_Fuse(4))
        with pytest.raises(_Crash):
            llm.generate(PROMPTS, SAMPLED)
        llm.pool.check()
        outputs = llm.resume()
    assert [core(output) for output in outputs] == [core(output) for output in whole]


def test_an_answered_request_leaves_nothing_behind(tmp_path: Path) -> None:
    with make(tmp_path) as llm:
        llm.generate(PROMPTS, GREEDY)
    assert not list(tmp_path.glob("*.dwc"))
    with make(tmp_path) as llm:
        assert llm.resume() == []


def test_new_requests_get_other_names_than_pending_ones(tmp_path: Path) -> None:
    begin(make(tmp_path), PROMPTS[:2], [GREEDY] * 2, 2)
    with make(tmp_path) as llm:
        [output] = llm.generate([PROMPTS[2]], GREEDY)
        assert output.request_id == "request-3"
        assert [one.request_id for one in llm.resume()] == ["request-1", "request-2"]


def test_pending_requests_outlive_a_process_that_does_not_want_them(tmp_path: Path) -> None:
    begin(make(tmp_path), PROMPTS[:2], [GREEDY] * 2, 2)
    with make(tmp_path) as llm:
        llm.generate([PROMPTS[2]], GREEDY)
    with make(tmp_path) as llm:
        assert len(llm.resume()) == 2


# --- streams ---------------------------------------------------------------------------------


def collect(deltas: Sequence[Delta]) -> dict[str, tuple[list[int], str]]:
    """The pieces of each request put together."""
    texts: dict[str, tuple[list[int], str]] = {}
    for delta in deltas:
        ids, text = texts.get(delta.request_id, ([], ""))
        texts[delta.request_id] = ([*ids, *delta.token_ids], text + delta.text)
    return texts


@pytest.mark.parametrize("ahead", [False, True])
def test_a_reader_gets_the_rest_of_its_stream(tmp_path: Path, ahead: bool) -> None:
    """Nothing twice, nothing missing; also where it has more than the checkpoint knew of."""
    params = SAMPLED.but(stop="zz")
    [whole] = tiny_llm(TARGET, block_size=4).generate([PROMPTS[0]], params)
    llm = make(tmp_path)
    stream = llm.stream(PROMPTS[0], params)
    got = [next(stream) for _ in range(5)]
    assert llm.checkpoints is not None
    llm.checkpoints.save()
    if ahead:
        got += [next(stream) for _ in range(3)]
    crash(llm)
    with make(tmp_path) as llm:
        have = {got[-1].request_id: got[-1].end}
        rest = list(llm.resume_stream(have if ahead else None))
        assert llm.checkpoints is not None
        assert llm.checkpoints.pending == {}
    if not ahead:  # the last piece was given, and its reader had not come back for the next one
        assert rest[0].start == got[-1].start
        got.pop()
    [(ids, text)] = collect([*got, *rest]).values()
    assert (ids, text) == (list(whole.token_ids), whole.text)
    assert rest[-1].output is not None
    assert core(rest[-1].output) == core(whole)


def test_a_closed_stream_is_forgotten(tmp_path: Path) -> None:
    with make(tmp_path) as llm:
        stream = llm.stream(PROMPTS[0], GREEDY)
        next(stream)
        stream.close()  # type: ignore[attr-defined]
    with make(tmp_path) as llm:
        assert llm.resume() == []


# --- what is refused, and what goes wrong ----------------------------------------------------


def saved(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.dwc"))


def test_the_one_before_is_used_when_the_newest_is_damaged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    llm = make(tmp_path)
    llm.engine.add(PROMPTS[0], GREEDY)
    assert llm.checkpoints is not None
    for _ in range(3):
        llm.engine.step()
        llm.checkpoints.save()
    crash(llm)
    before, newest = saved(tmp_path)
    data = bytearray(newest.read_bytes())
    data[len(data) // 2] ^= 1
    newest.write_bytes(data)
    [whole] = tiny_llm(TARGET, block_size=4).generate([PROMPTS[0]], GREEDY)
    with caplog.at_level(logging.WARNING), make(tmp_path) as llm:
        assert "checksum" in caplog.text
        assert llm.checkpoints is not None
        llm.checkpoints.save()
        assert before in saved(tmp_path), "a damaged one counts as one of two"
        [output] = llm.resume()
    assert core(output) == core(whole)


def test_nothing_is_begun_where_all_are_damaged(tmp_path: Path) -> None:
    begin(make(tmp_path), PROMPTS[:1], [GREEDY], 2)
    for path in saved(tmp_path):
        path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="damaged"):
        make(tmp_path)
    assert saved(tmp_path)


def test_a_torn_file_is_never_seen(tmp_path: Path) -> None:
    """A process killed while it writes leaves a part under another name."""
    begin(make(tmp_path), PROMPTS[:1], [GREEDY], 2)
    (tmp_path / "checkpoint-00000009.part").write_bytes(b"draftwood-checkpoint-1\nhalf")
    with make(tmp_path) as llm:
        assert len(llm.resume()) == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"weights": "w"}, "other weights"),
        ({"quantization": "int8"}, "another quantization: int8 there, none here"),
        ({"draftwood": "0.0.1"}, "another version: 0.0.1 there"),
        ({"dtype": "bfloat16"}, "another dtype"),
        ({"arithmetic": "cuda 12"}, "another arithmetic"),
    ],
)
def test_what_another_made_is_refused_with_its_reason(
    tmp_path: Path, change: dict[str, str], words: str
) -> None:
    maker = replace(Maker.of(TARGET.spec), **change)
    store = CheckpointStore(tmp_path)
    store.write(Checkpoint(maker, ()).encode(1 << 20)[0])
    store.close()
    with pytest.raises(CheckpointError, match=words):
        make(tmp_path)
    assert len(saved(tmp_path)) == 1, "it is still there for whoever made it"


def test_another_name_or_draft_is_the_same_model(tmp_path: Path) -> None:
    maker = replace(Maker.of(TARGET.spec), model="moved", draft="other")
    store = CheckpointStore(tmp_path)
    store.write(Checkpoint(maker, ()).encode(1 << 20)[0])
    store.close()
    with make(tmp_path) as llm:
        assert llm.resume() == []


def test_another_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-00000001.dwc").write_bytes(b"draftwood-checkpoint-7\n...")
    with pytest.raises(CheckpointError, match="format 7"):
        make(tmp_path)


def test_a_folder_serves_one_process_at_a_time(tmp_path: Path) -> None:
    with make(tmp_path), pytest.raises(ConfigError, match="another process"):
        make(tmp_path)
    make(tmp_path).close()


def test_a_smaller_memory_is_refused_and_nothing_is_lost(tmp_path: Path) -> None:
    begin(make(tmp_path), PROMPTS[:1], [GREEDY], 2)
    with (
        make(tmp_path, num_blocks=9) as llm,
        pytest.raises(ConfigError, match=r"request-1.*context"),
    ):
        llm.resume()
    with make(tmp_path) as llm:
        assert len(llm.resume()) == 1


def test_resume_needs_a_checkpoint() -> None:
    with pytest.raises(ConfigError, match="checkpoint"):
        tiny_llm(TARGET).resume()
    with pytest.raises(ConfigError, match="checkpoint"):
        tiny_llm(TARGET).resume_stream()


def test_a_full_disk_costs_checkpoints_and_no_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    [whole] = tiny_llm(TARGET, block_size=4).generate([PROMPTS[0]], GREEDY)
    with make(tmp_path) as llm:
        monkeypatch.setattr(CheckpointStore, "write", full)
        [output] = llm.generate([PROMPTS[0]], GREEDY)
        assert llm.checkpoints is not None
        assert not llm.checkpoints.save() or not llm.checkpoints.stats.num_written
        assert llm.checkpoints.stats.num_failed == 1
    assert core(output) == core(whole)
    assert "No space left" in caplog.text


def test_requests_with_functions_are_not_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with make(tmp_path) as llm:
        params = GREEDY.but(logits_processors=(lambda ids, scores: scores,))
        llm.engine.add(PROMPTS[0], params)
        llm.engine.add(PROMPTS[1], GREEDY)
        llm.engine.step()
    assert "logits processors" in caplog.text
    with make(tmp_path) as llm:
        assert [list(one.prompt_token_ids) for one in llm.resume()] == [PROMPTS[1]]


def test_a_checkpoint_is_bounded() -> None:
    """What a drafter remembers goes first, then the youngest requests."""
    llm = tiny_llm(TARGET)
    every = tuple(SavedRequest.of(llm.engine.make(PROMPTS[0], GREEDY)) for _ in range(100))
    checkpoint = Checkpoint(Maker.of(TARGET.spec), every, 100, "auto", b"x" * 30_000)
    whole, left_out = checkpoint.encode(1 << 20)
    assert left_out == 0
    small, left_out = checkpoint.encode(20_000)
    assert len(small) <= 20_000
    assert 0 < left_out < 100
    assert b'"auto", ""' in small
    assert len(whole) > 60_000


def test_it_is_written_every_few_seconds_and_soon_after_news(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr("draftwood.engine.checkpoint.writer.monotonic", lambda: now[0])
    llm = make(tmp_path)
    writer = llm.checkpoints
    assert writer is not None
    put: list[int] = []
    monkeypatch.setattr(writer._background, "put", lambda c: put.append(len(c.requests)) or 0)
    long = GREEDY.but(max_tokens=100, speculation=False)
    llm.engine.add(PROMPTS[0], long)

    def rounds(count: int) -> None:
        for _ in range(count):
            llm.engine.step()

    rounds(4)
    assert put == []
    now[0] += 0.6
    rounds(3)
    assert put == [1]
    now[0] += 0.6
    rounds(3)
    assert put == [1], "nothing is new"
    now[0] += 1000.0
    rounds(3)
    assert put == [1, 1]
    llm.engine.close()


def test_what_the_tables_have_learned_is_restored(tmp_path: Path) -> None:
    llm = make(tmp_path, drafter="recycling")
    llm.generate(PROMPTS, GREEDY)
    llm.engine.add(PROMPTS[0], GREEDY)
    llm.engine.step()
    assert llm.checkpoints is not None
    llm.checkpoints.save()
    table: Callable[[TinyLLM], Any] = lambda one: one.engine.drafter.inner.memory.of(None).table  # noqa: E731
    old = table(llm)
    crash(llm)
    with make(tmp_path, drafter="recycling") as llm:
        assert len(table(llm)) == len(old) > 0
        assert table(llm)._pairs == old._pairs
    with make(tmp_path / "other", drafter="suffix") as llm:
        assert llm.engine.drafter.state() == b""


def test_a_failing_drafter_costs_its_memory_only(tmp_path: Path) -> None:
    llm = make(tmp_path, drafter="recycling")
    llm.engine.drafter.restore(b"nonsense")
    assert llm.engine.drafter.num_failures == 1
    llm.close()


def test_half_a_prompts_logprobs_are_read_again() -> None:
    llm = tiny_llm(TARGET, max_batch_tokens=16)
    [whole] = llm.generate([PROMPTS[0]], GREEDY.but(prompt_logprobs=1))
    seq = llm.engine.add(PROMPTS[0], GREEDY.but(prompt_logprobs=1), "a")
    llm.engine.step()
    assert 0 < len(seq.prompt_logprobs) < 42
    record = SavedRequest.from_json(json.loads(json.dumps(SavedRequest.of(seq).to_json())))
    llm.engine.abort(seq)
    back = llm.engine.resume(record)
    while not back.finished:
        llm.engine.step()
    assert whole.prompt_logprobs is not None
    assert [one.token for one in back.prompt_logprobs] == PROMPTS[0][1:]
    assert back.output_ids == list(whole.token_ids)


def test_characters_of_several_tokens_go_on() -> None:
    """The detokenizer of a resumed request holds back what the first one held back."""
    tokenizer = Tokenizer(bpe_backend())
    ids = tokenizer.encode("東京 🌲 naïve")
    llm = tiny_llm("llama", tokenizer=tokenizer, vocab_size=len(tokenizer))
    seq = llm.engine.make([1, 2, 3], SamplingParams(max_tokens=200))
    for token in ids:
        seq.append([token])
        back = llm.engine.resume(replace(SavedRequest.of(seq), request_id=f"r{len(seq.tokens)}"))
        assert back.visible_text() == seq.visible_text()
        assert back.num_visible == seq.num_visible
        assert back.detokenizer.offsets == seq.detokenizer.offsets


def test_offsets_of_pieces_follow_each_other(tmp_path: Path) -> None:
    with make(tmp_path) as llm:
        place = Offset()
        for delta in llm.stream(PROMPTS[0], GREEDY):
            assert delta.start == place
            place = delta.end
    assert place.num_tokens == 24
