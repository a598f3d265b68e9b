"""Drafting with a model that speaks other tokens than the target."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draftwood.config import EngineConfig
from draftwood.draft.base import Drafter
from draftwood.draft.foreign import ForeignDrafter, Match
from draftwood.draft.fused import FusedDrafter
from draftwood.draft.grow import Calibrator
from draftwood.draft.mirror import Mirror
from draftwood.draft.respell import respell
from draftwood.draft.vocabulary import Bridge
from draftwood.errors import ConfigError
from draftwood.llm import LLM
from draftwood.sampling import SamplingParams
from draftwood.text import Tokenizer
from draftwood.tree.token_tree import TreeBuilder
from tests.tiny import (
    CORPUS,
    CountingModel,
    HFModel,
    TinyLLM,
    distinct,
    hf_model,
    make_module,
    save_tiny,
    tiny_llm,
)
from tests.vocabularies import (
    bpe_tokenizer,
    foreign_drafter,
    knowing_model,
    letters_drafter,
    letters_tokenizer,
    metaspace_backend,
    metaspace_tokenizer,
    other_letters_tokenizer,
)

MATCHES: tuple[Match, ...] = ("text", "tokens")
every_match = pytest.mark.parametrize("match", MATCHES)
GREEDY = SamplingParams(max_tokens=40, ignore_eos=True)
TOKENIZERS = {
    "bpe": bpe_tokenizer,
    "metaspace": metaspace_tokenizer,
    "unigram": lambda: metaspace_tokenizer(unigram=True),
}
PAIRS = [("metaspace", "bpe"), ("bpe", "metaspace"), ("bpe", "unigram"), ("unigram", "bpe")]
every_pair = pytest.mark.parametrize("pair", PAIRS, ids="-".join)


@lru_cache
def bridge(pair: tuple[str, str]) -> Bridge:
    """Built once: it is never changed."""
    return Bridge.make(TOKENIZERS[pair[0]](), TOKENIZERS[pair[1]]())


# --- what tokens have to do with each other ---------------------------------------------------


@every_pair
def test_tokens_meet_by_their_bytes(pair: tuple[str, str]) -> None:
    """One to one, whatever either vocabulary writes for a space."""
    both = bridge(pair)
    assert len(set(both.to_target.values())) == len(both.to_target)
    plain = {ours: theirs for theirs, ours in both.to_target.items() if theirs not in both.specials}
    assert len(plain) > 200
    for ours, theirs in plain.items():
        assert both.target.table[ours] == both.draft.table[theirs]
    assert both.draft.ids[b" "] in both.to_target
    assert 0 < both.share <= 1


def test_special_tokens_meet_by_name_and_by_the_part_they_play() -> None:
    """The end of a text is its end, whatever it is called."""
    both = bridge(("metaspace", "bpe"))
    assert both.to_target[both.draft.specials["<|im_end|>"]] == both.target.specials["</s>"]
    assert both.to_draft[both.target.specials["</s>"]] == both.draft.specials["<|im_end|>"]
    assert both.to_draft[both.target.specials["<s>"]] == b"", "GPT-2 has no beginning of a text"
    back = bridge(("bpe", "metaspace"))
    assert back.to_draft[back.target.specials["<|im_start|>"]] == b"<|im_start|>", "written out"
    same = bridge(("bpe", "bpe"))
    assert all(same.to_draft[token] == token for token in same.target.names)
    assert same.share == 1


# --- the target's text in the draft's tokens --------------------------------------------------


@every_pair
@given(data=st.data())
def test_the_mirror_says_the_text(pair: tuple[str, str], data: st.DataObject) -> None:
    """Whatever tokens come, in whatever portions, halves of characters included."""
    both = bridge(pair)
    size = len(both.target.table)
    tokens = data.draw(st.lists(st.integers(0, size + 3), max_size=60))
    mirror, done = Mirror(both), 0
    while done < len(tokens):
        done = data.draw(st.integers(done + 1, len(tokens)))
        before = list(mirror.ids)
        same = mirror.update(tokens[:done])
        assert mirror.ids[:same] == before[:same]
        assert said(mirror, both) == wanted(tokens[:done], both)


def said(mirror: Mirror, both: Bridge) -> bytes:
    """What a mirror's ids say, special tokens by name."""
    return b"".join(
        both.draft.names[token].encode() if token in both.draft.names else both.draft.spell([token])
        for token in mirror.ids
    )


def wanted(tokens: list[int], both: Bridge) -> bytes:
    """What it should say: the draft's prefix, then each token's bytes or its counterpart's name."""
    prefix = [both.draft.names[token].encode() for token in both.draft.prefix]
    pieces = [both.to_draft[token] for token in tokens if token < len(both.to_draft)]
    if prefix and pieces and pieces[0] in both.draft.prefix:
        prefix = []
    texts = [i for i, piece in enumerate(pieces) if isinstance(piece, bytes) and piece]
    if texts and both.target.leads:
        pieces[texts[0]] = pieces[texts[0]].removeprefix(b" ")  # type: ignore[union-attr]
    if texts and both.draft.leads:
        pieces[texts[0]] = b" " + pieces[texts[0]]  # type: ignore[operator]
    names = both.draft.names
    return b"".join([*prefix, *(names[p].encode() if isinstance(p, int) else p for p in pieces)])


@every_pair
def test_the_mirror_spells_as_the_draft_would(pair: tuple[str, str]) -> None:
    """Token by token it comes to what the draft's own tokenizer says of the whole text."""
    both = bridge(pair)
    for text in (*CORPUS, "one  two\n\n  three"):
        tokens = TOKENIZERS[pair[0]]().encode(text)
        mirror = Mirror(both)
        for end in range(1, len(tokens) + 1):
            mirror.update(tokens[:end])
        assert mirror.ids == TOKENIZERS[pair[1]]().encode(text)


@every_pair
def test_a_mirror_that_loses_text_begins_anew(pair: tuple[str, str]) -> None:
    """A stop string takes tokens back."""
    tokens = TOKENIZERS[pair[0]]().encode(CORPUS[0])
    mirror, other = Mirror(bridge(pair)), Mirror(bridge(pair))
    mirror.update(tokens)
    before = list(mirror.ids)
    same = mirror.update(tokens[:9])
    other.update(tokens[:9])
    assert mirror.ids == other.ids
    assert 0 < same <= len(other.ids)
    assert before[:same] == mirror.ids[:same]


# --- the draft's tree in the target's tokens --------------------------------------------------


def draft_tree(both: Bridge, *paths: tuple[bytes, float]) -> Any:
    """A tree of draft tokens; each path spells some bytes, and each token takes a factor."""
    builder = TreeBuilder(0)
    for data, factor in paths:
        node = 0
        for token in both.draft.encode(data):
            node = builder.add(node, token, builder.scores[node] * factor)
    return builder.build()


def paths_of(tree: Any, both: Bridge) -> set[bytes]:
    """What the leaves of a tree say."""
    leaves = set(range(1, len(tree))) - set(tree.parents)
    return {both.target.spell(tree.tokens[n] for n in tree.path(leaf)[1:]) for leaf in leaves}


@every_pair
def test_paths_are_spelled_in_the_targets_tokens(pair: tuple[str, str]) -> None:
    """Each path's text is there, as the target would write it, and common beginnings are one."""
    both = bridge(pair)
    text, goes_on = "the quick brown", [b" fox jumps", b" fox and", b" dog\n"]
    committed = TOKENIZERS[pair[0]]().encode(text)
    tree = respell(draft_tree(both, *((g, 0.9) for g in goes_on)), committed, both, Calibrator())
    assert tree.tokens[0] == committed[-1]
    assert paths_of(tree, both) == set(goes_on)
    whole = TOKENIZERS[pair[0]]().encode(text + " fox jumps")
    node = 0
    for token in whole[len(committed) :]:
        node = tree.child(node, token) or pytest.fail("not as the target would write it")
    for node in range(1, len(tree)):
        assert 0 < tree.scores[node] <= tree.scores[tree.parents[node]]
        assert tree.sources[node].startswith("model:")
    twins = set(zip(tree.parents, tree.tokens, strict=True))
    assert len(twins) == len(tree)


def test_a_token_scores_as_the_draft_tokens_that_cover_it() -> None:
    """One target token may take several of the draft's, and one of those may serve several."""
    draft = letters_tokenizer(8)
    pairs = other_letters_tokenizer(8, pairs=True)
    fresh = Calibrator()
    wide = Bridge.make(pairs, draft)  # the target writes "ab" as one token
    tree = respell(draft_tree(wide, (b"abcd", 0.5)), pairs.encode("e"), wide, fresh)
    assert len(tree) == 3
    assert tree.scores == pytest.approx((1, 0.25, 0.25 * 0.25 * 0.5)), "the last is half trusted"
    narrow = Bridge.make(draft, pairs)
    tree = respell(draft_tree(narrow, (b"abcd", 0.5)), draft.encode("e"), narrow, fresh)
    assert len(tree) == 5
    assert tree.scores == pytest.approx((1, 0.5, 0.5, 0.25, 0.125))


def test_a_path_that_would_change_what_is_written_is_spelled_alone() -> None:
    """After "a" comes "b", and "ab" is a token: the committed one stays, "b" is a guess."""
    draft, target = letters_tokenizer(8), other_letters_tokenizer(8, pairs=True)
    both = Bridge.make(target, draft)
    tree = respell(draft_tree(both, (b"bcd", 0.9)), target.encode("a"), both, Calibrator())
    assert paths_of(tree, both) == {b"bcd"}
    assert {source.split(".")[0] for source in tree.sources[1:]} == {"model:alone"}


def test_a_path_ends_at_a_special_token() -> None:
    """The draft's end of a text is the target's; the word before it is whole."""
    both = bridge(("metaspace", "bpe"))
    inner = draft_tree(both, (b" dog", 0.9))
    builder = TreeBuilder.of(inner)
    node = builder.add(len(inner) - 1, both.draft.specials["<|im_end|>"], 0.5)
    builder.add(node, both.draft.ids[b"x"], 0.4)
    committed = metaspace_tokenizer().encode("the lazy")
    tree = respell(builder.build(), committed, both, Calibrator())
    assert tree.tokens[-1] == both.target.specials["</s>"]
    assert not any("last" in source for source in tree.sources)
    assert both.target.spell(tree.tokens[1:]) == b" dog"


# --- whole rounds -----------------------------------------------------------------------------

TEXT = " ".join(f"{line}, {i} naïve 東京 🌲" for i, line in enumerate(CORPUS[:3] * 3))


def knowing_llm(
    pair: tuple[str, str], match: Match, text: str = TEXT, **pool: int
) -> tuple[TinyLLM, ForeignDrafter, CountingModel]:
    """A target and a draft that both know a text, each in its own tokens."""
    target, draft = (TOKENIZERS[name]() for name in pair)
    counting = CountingModel(knowing_model(draft, [text]))
    drafter = foreign_drafter(match, target, draft, counting, **pool)
    llm = tiny_llm(
        knowing_model(target, [text]), drafter=drafter, tokenizer=target, block_size=4,
        num_blocks=600, max_tree_nodes=8,
    )  # fmt: skip
    return llm, drafter, counting


def assert_nothing_is_held(drafter: ForeignDrafter) -> None:
    """All blocks are free once the prefix index has let go."""
    drafter.pool.check()
    assert drafter.pool.num_free + len(drafter.prefix) == drafter.pool.num_blocks
    drafter.prefix.clear()
    assert drafter.pool.num_free == drafter.pool.num_blocks


@every_match
@every_pair
def test_a_draft_that_knows_the_text_is_right(pair: tuple[str, str], match: Match) -> None:
    """Its KV must hold the text in its own tokens, or it knows nothing (`knowing_model`)."""
    llm, drafter, _ = knowing_llm(pair, match)
    prompt = TOKENIZERS[pair[0]]().encode(TEXT[:30])
    num = len(TOKENIZERS[pair[0]]().encode(TEXT)) - len(prompt) - 10
    [output] = llm.outputs([prompt], GREEDY.but(max_tokens=num))
    text = drafter._bridge.target.spell([*prompt, *output.token_ids]).removeprefix(b" ")
    assert TEXT.encode().startswith(text)
    assert llm.engine.drafter.num_failures == 0
    # What only one of the two can say as one token cannot be drafted by tokens.
    assert output.metrics.mean_acceptance_length > (4 if match == "text" else 1.7)
    assert_nothing_is_held(drafter)


@every_match
def test_the_draft_reads_a_long_text_once(match: Match) -> None:
    """Round after round it is fed what is new, and a second request finds the first one's KV."""
    llm, drafter, counting = knowing_llm(("metaspace", "bpe"), match)
    tokens = metaspace_tokenizer().encode(TEXT)
    prompt = tokens[: len(tokens) // 2]
    longest: list[list[int]] = []
    caught_up: list[int] = []
    for _ in range(2):
        seq = llm.engine.add(prompt, GREEDY.but(max_tokens=60))
        longest.append([])
        while not seq.finished:
            counting.clear()
            llm.engine.step()
            longest[-1].append(max(counting.rows, default=0))
            caught_up += counting.rows[:1] if longest[-1][-1] < 13 else []
    first, second = longest
    assert max(first) > 150
    assert first.index(max(first)) <= 1, "the prompt comes first"
    # A level has four rows; what the last words become with the new ones takes a few more.
    assert sorted(first)[-2] <= 12
    assert max(second) <= 12, "the prompt was read again"
    assert sum(caught_up) < 3.5 * len(caught_up), "the accepted path was read again"
    assert_nothing_is_held(drafter)


@every_match
def test_the_same_draft_in_other_words_is_always_right(match: Match) -> None:
    """The target's own weights under another numbering of its letters: nothing is ever rejected.

    By tokens also when sampled, for the noise is looked up by the target's ids.
    """
    size = 32
    target = hf_model("llama", vocab_size=size, calm=True)
    module = make_module("llama", vocab_size=size, calm=True)
    with torch.no_grad():
        for layer in (module.get_input_embeddings(), module.get_output_embeddings()):
            layer.weight.copy_(layer.weight.flip(0))
    draft = HFModel(module, name="flipped", fingerprint="flipped")
    other = other_letters_tokenizer(size, pairs=False)
    for params in (GREEDY, GREEDY.but(temperature=1.0, seed=3)):
        drafter = foreign_drafter(match, letters_tokenizer(size), other, draft)
        llm = tiny_llm(target, drafter=drafter, block_size=4, max_tree_nodes=6)
        prompts = [[1, 2, 3, 4, 5, 6], [9, 8, 7]]
        outputs = llm.outputs(prompts, params)
        plain = tiny_llm(target, drafter="none").run(prompts, params)
        assert [list(o.token_ids) for o in outputs] == plain
        assert max(map(distinct, plain)) > 5
        if params.greedy or match == "tokens":
            assert all(o.metrics.mean_acceptance_length > 2.5 for o in outputs)
        assert_nothing_is_held(drafter)


@every_match
@pytest.mark.parametrize("num_blocks", [1, 14, 60])
def test_a_draft_pool_that_is_too_small_means_fewer_drafts(match: Match, num_blocks: int) -> None:
    """Four requests, room for none to all of them: the texts are the same, nothing is kept."""
    prompts = [[i, 1, 2, 3, 4, 5, 6, 7, 8, 9][: 3 + 2 * i] for i in range(4)]
    plain = tiny_llm("llama", drafter="none").run(prompts, GREEDY)
    drafter = letters_drafter(match, 32, num_blocks=num_blocks)
    llm = tiny_llm("llama", drafter=drafter, max_tree_nodes=6)
    outputs = llm.outputs(prompts, GREEDY)
    assert [list(o.token_ids) for o in outputs] == plain
    assert llm.engine.drafter.num_failures == 0
    drafted = [o.metrics.num_draft_tokens > 0 for o in outputs]
    assert any(drafted) == (num_blocks > 8)
    assert_nothing_is_held(drafter)


@every_match
def test_nothing_is_held_when_requests_are_aborted_or_put_back(match: Match) -> None:
    """Preemption stops the drafter on a sequence and starts it again; abort stops it for good."""
    drafter = letters_drafter(match, 32)
    llm = tiny_llm("llama", drafter=drafter, block_size=4, num_blocks=26, max_tree_nodes=6)
    prompts = [[i, *range(20)] for i in range(4)]
    params = GREEDY.but(max_tokens=60)
    seqs = [llm.engine.add(prompt, params) for prompt in prompts]
    for step in range(2000):
        if step == 9:
            llm.engine.abort(seqs[1])
        if all(seq.finished for seq in seqs):
            break
        llm.engine.step()
    plain = tiny_llm("llama", drafter="none").run(prompts, params)
    assert [seq.output_ids for seq in (seqs[0], *seqs[2:])] == [plain[0], *plain[2:]]
    assert seqs[1].output_ids == plain[1][: len(seqs[1].output_ids)]
    assert drafter._states == {}
    assert_nothing_is_held(drafter)


def test_a_draft_with_a_shorter_context_falls_silent() -> None:
    """Beyond its own positions it has nothing to say, and it counts in its own tokens."""
    target, draft = metaspace_tokenizer(), bpe_tokenizer()
    counting = CountingModel(knowing_model(draft, [TEXT], max_len=60))
    drafter = foreign_drafter("text", target, draft, counting)
    llm = tiny_llm(knowing_model(target, [TEXT]), drafter=drafter, tokenizer=target, num_blocks=200)
    prompt = target.encode(TEXT[:40])
    [output] = llm.outputs([prompt], GREEDY.but(max_tokens=60))
    assert output.metrics.num_accepted_tokens > 0
    assert max(map(max, counting.positions)) <= 59
    assert llm.engine.drafter.num_failures == 0


def test_outputs_of_one_prompt_share_the_drafts_kv() -> None:
    """Three outputs in one batch: the draft reads the prompt once."""
    llm, _, counting = knowing_llm(("bpe", "metaspace"), "text")
    prompt = bpe_tokenizer().encode(TEXT[:200])
    llm.outputs([prompt], GREEDY.but(max_tokens=6, n=3, temperature=0.1, seed=0))
    size = len(metaspace_tokenizer().encode(TEXT[:200]))
    long = [rows for rows in counting.rows if rows > 40]
    assert sum(long) <= size + 40, counting.rows


# --- models in folders ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A Llama that writes SentencePiece; a GPT-2 and another Llama that write byte-level BPE."""
    root = tmp_path_factory.mktemp("vocabularies")
    spm = metaspace_backend()
    return {
        "spm": str(save_tiny(root / "spm", "llama", vocab_size=len(spm), backend=spm)),
        "gpt2": str(save_tiny(root / "gpt2", "gpt2", seed=8)),
        "padded": str(save_tiny(root / "padded", "llama", vocab_size=352, seed=9)),
    }


@pytest.mark.parametrize(("target", "draft"), [("spm", "gpt2"), ("gpt2", "spm")])
@pytest.mark.parametrize(("drafter", "kind"), [("model", ForeignDrafter), ("auto", FusedDrafter)])
@every_match
def test_same_text_with_a_draft_of_another_vocabulary(
    folders: dict[str, str],
    target: str,
    draft: str,
    match: Match,
    drafter: str,
    kind: type[Drafter],
) -> None:
    """Random models say halves of characters and special tokens: nothing of it may show."""
    prompts = ["the quick brown fox", "naïve 東京", "a", "two  spaces and\n"]
    plain = LLM(folders[target], drafter="none")
    fast = LLM(
        folders[target],
        draft=folders[draft],
        drafter=drafter,
        draft_match=match,
        config=EngineConfig(adaptive=False),  # drafting never rests, whatever it costs here
    )
    assert isinstance(fast.engine.drafter.inner, kind)
    for params in (
        SamplingParams(max_tokens=30, ignore_eos=True),
        SamplingParams(max_tokens=30, temperature=0.9, top_p=0.95, seed=5),
    ):
        wanted = [o.token_ids for o in plain.generate(prompts, params)]
        for _ in range(2):
            got = fast.generate(prompts, params)
            assert [o.token_ids for o in got] == wanted
        assert any(o.metrics.num_draft_tokens for o in got)
    assert fast.engine.drafter.num_failures == 0


def test_a_conversation_whose_special_tokens_the_draft_lacks(folders: dict[str, str]) -> None:
    """`<|im_start|>` is written out for a draft that has no such token."""
    messages = [{"role": "user", "content": "naïve?"}]
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    wanted = LLM(folders["gpt2"], drafter="none").chat(messages, params)
    fast = LLM(folders["gpt2"], draft=folders["spm"])
    assert fast.chat(messages, params).token_ids == wanted.token_ids
    assert isinstance(fast.vocabulary, Bridge)
    mirror = Mirror(fast.vocabulary)
    mirror.update(wanted.prompt_token_ids)
    assert b"<|im_start|>user\n" in said(mirror, fast.vocabulary)


def test_padding_makes_no_other_vocabulary(folders: dict[str, str]) -> None:
    """The same tokenizer over more rows of logits: ids are ids, one pool holds both."""
    llm = LLM(folders["gpt2"], draft=folders["padded"])
    assert llm.vocabulary == len(bpe_tokenizer())
    assert llm.pool.draft is not None


def test_nearly_equal_vocabularies_meet_by_tokens(folders: dict[str, str]) -> None:
    """By default text is matched, and tokens where the draft has hardly any of its own."""
    model = hf_model("gpt2", vocab_size=32)
    same = other_letters_tokenizer(32, pairs=False)
    pairs = other_letters_tokenizer(16, pairs=True)
    assert foreign_drafter("auto", letters_tokenizer(32), same, model).by_tokens
    assert not foreign_drafter("auto", letters_tokenizer(16), pairs, model).by_tokens
    with pytest.raises(ConfigError, match="draft_match is 'words'"):
        LLM(folders["gpt2"], draft=folders["spm"], draft_match="words")  # type: ignore[arg-type]


def test_folders_hold_what_the_tests_say(folders: dict[str, str]) -> None:
    """Tokenizers survive the way through a folder."""
    for name, tokenizer in (("spm", metaspace_tokenizer()), ("gpt2", bpe_tokenizer())):
        read = Tokenizer.load(Path(folders[name]))
        assert read.token_strings == tokenizer.token_strings
        assert read.encode(CORPUS[3]) == tokenizer.encode(CORPUS[3])
