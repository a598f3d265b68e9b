"""Every architecture says what transformers says: the contract of `models/hf.py`.

transformers' own model with equal weights is the oracle: `generate` for tokens, `forward` for
logits. KV debug mode is on, so a slot that is read without having been written shows as NaN.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor, nn

from draftwood.attention import Work, pack
from draftwood.errors import ConfigError, UnsupportedModelError
from draftwood.kv import BlockPool, Lease
from draftwood.models.hf import HFModel, _register
from draftwood.sampling import SamplingParams
from draftwood.tree import TokenTree
from tests.tiny import (
    ARCHITECTURES,
    MAX_LEN,
    VOCAB,
    WINDOW,
    WINDOWED,
    distinct,
    greedy_reference,
    hf_model,
    make_module,
    near_oracle,
    random_prompts,
    reference,
    tiny_llm,
)

NUM_TOKENS = 32
LENGTHS = (23, 1, 9)
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)

architectures = pytest.mark.parametrize("arch", list(ARCHITECTURES))


def expected(arch: str, lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    """What transformers.generate continues the prompts with, checked to be worth comparing."""
    texts = [greedy_reference(arch, p, NUM_TOKENS) for p in random_prompts(lengths)]
    assert max(map(distinct, texts)) >= 8, "the reference text is too dull to prove anything"
    return texts


def forward_chunks(
    model: HFModel, ids: list[int], bounds: tuple[int, ...], block_size: int
) -> Tensor:
    """Logits of all positions, computed in chunks that end at `bounds`."""
    pool = BlockPool(model.spec.kv, num_blocks=len(ids) + 1, block_size=block_size, debug=True)
    lease = Lease.open(pool)
    logits, start = [], 0
    for stop in (*bounds, len(ids)):
        lease.reserve(stop - start)
        work = Work(lease, start, ids[start:stop], None, range(stop - start))
        logits.append(model.forward(pack([work], pool.device), pool.target))
        lease.commit(range(stop - start))
        start = stop
    return torch.cat(logits)


@architectures
@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_logits_are_transformers(arch: str, block_size: int) -> None:
    """A lost scale, soft cap, sink, window or position makes logits differ long before tokens do.

    The chunks begin before, at and behind the window's edge.
    """
    [ids] = random_prompts([40])
    with torch.no_grad():
        wanted = reference(arch, calm=True)(torch.tensor([ids]), use_cache=False).logits[0]
    assert wanted.std() > 1, "flat logits cannot show a difference"
    model = hf_model(arch, calm=True)
    for bounds in ((), (7, 8, 9, 39), tuple(range(1, 40))):
        got = forward_chunks(model, ids, bounds, block_size)
        torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)


@architectures
def test_every_path_of_a_tree_is_the_chain(arch: str) -> None:
    """Each node must see the context, its ancestors and itself, and nothing of its siblings.

    The tree is deeper than the sliding window, so that ancestors fall out of it too.
    """
    [ids] = random_prompts([13])
    tokens, parents = [ids[-1]], [-1]
    for i in range(1, 24):
        tokens.append((5 * i + 3) % VOCAB)
        parents.append(max(0, i - 1 if i % 2 else i - 2 if i > 1 else 0))
    tree = TokenTree(tuple(tokens), tuple(parents), (1.0,) * 24, ("",) * 24)
    assert max(tree.depths) > WINDOW
    assert not tree.is_chain
    model = hf_model(arch, calm=True)
    pool = BlockPool(model.spec.kv, num_blocks=50, block_size=3, debug=True)
    lease = Lease.open(pool)
    lease.reserve(12)
    model.forward(pack([Work(lease, 0, ids[:-1], None, ())], pool.device), pool.target)
    lease.commit(range(12))
    lease.reserve(24)
    work = Work(lease, 12, tree.tokens, tree, range(24))
    logits = model.forward(pack([work], pool.device), pool.target)
    for node in range(24):
        text = ids[:-1] + [tree.tokens[i] for i in tree.path(node)]
        with torch.no_grad():
            wanted = reference(arch, calm=True)(torch.tensor([text]), use_cache=False).logits[0, -1]
        torch.testing.assert_close(logits[node], wanted, atol=1e-5, rtol=1e-5)


@architectures
@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize("chunk", [7, 512])
def test_plain_decoding_is_transformers_generate(arch: str, block_size: int, chunk: int) -> None:
    """Prompts of unequal lengths in one batch, computed in chunks of 7 and whole."""
    llm = tiny_llm(arch, drafter="none", block_size=block_size, max_batch_tokens=chunk)
    assert llm.run(random_prompts(LENGTHS), GREEDY) == expected(arch)


@architectures
@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_speculative_decoding_is_transformers_generate(arch: str, block_size: int) -> None:
    """Branching trees of which a path of random length is right: commits move KV every round."""
    prompts, texts = random_prompts(LENGTHS), expected(arch)
    answers = {tuple(p): text for p, text in zip(prompts, texts, strict=True)}
    llm = tiny_llm(
        arch,
        drafter=near_oracle(answers),
        block_size=block_size,
        max_batch_tokens=7,
        max_tree_nodes=12,
    )
    outputs = llm.outputs(prompts, GREEDY)
    assert [list(o.token_ids) for o in outputs] == texts
    assert all(o.metrics.mean_acceptance_length > 1.3 for o in outputs), "nothing was accepted"


@pytest.mark.parametrize("arch", WINDOWED)
@pytest.mark.parametrize("block_size", [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 64])
def test_across_the_sliding_window(arch: str, block_size: int) -> None:
    """A rejected node must not have pushed out what the window still needs, at any block edge."""
    prompts = random_prompts((WINDOW - 1, WINDOW, 3 * WINDOW + 1))
    texts = expected(arch, (WINDOW - 1, WINDOW, 3 * WINDOW + 1))
    answers = {tuple(p): text for p, text in zip(prompts, texts, strict=True)}
    drafter = near_oracle(answers, seed=block_size)
    llm = tiny_llm(
        arch, drafter=drafter, block_size=block_size, max_tree_nodes=20, max_batch_tokens=5
    )
    assert llm.run(prompts, GREEDY) == texts
    assert llm.run(prompts, GREEDY) == texts, "differs when the prompt comes from the prefix cache"


@architectures
def test_batch_mates_do_not_matter(arch: str) -> None:
    """A row that looks at another sequence's rows changes with its company."""
    prompts = random_prompts((2, 17, 5, 30, 8))
    alone = tiny_llm(arch, drafter="bushy", max_batch_tokens=64)
    together = tiny_llm(arch, drafter="bushy", max_batch_tokens=11)
    one_by_one = [alone.run([prompt], GREEDY)[0] for prompt in prompts]
    assert together.run(prompts, GREEDY) == one_by_one


def test_a_model_with_the_same_weights_twice_is_not_disturbed() -> None:
    """Wrapping must not change what the model itself computes beyond rounding (packed weights)."""
    wanted = reference("llama")(torch.tensor([[1, 2, 3]])).logits
    again = make_module("llama")
    HFModel(make_module("llama"))
    again.set_attn_implementation("eager")
    torch.testing.assert_close(again(torch.tensor([[1, 2, 3]])).logits, wanted)


def test_tied_weights_survive_the_packing() -> None:
    """An output layer tied to the embedding: packing one must not take the other away."""
    module = tf.AutoModelForCausalLM.from_config(
        tf.GPT2Config(
            vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=64,
            bos_token_id=None, eos_token_id=None,
        ),
        dtype=torch.float32,
    ).eval()  # fmt: skip
    ids = list(range(20))
    with torch.no_grad():
        wanted = module(torch.tensor([ids])).logits[0]
    num_parameters = sum(p.numel() for p in module.parameters())
    _register()
    model = HFModel(module)
    torch.testing.assert_close(forward_chunks(model, ids, (7,), 4), wanted, atol=1e-5, rtol=1e-5)
    assert model.spec.num_parameters == num_parameters


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_runs_close_to_float32(dtype: torch.dtype) -> None:
    """The paths for other dtypes exist on the CPU too, KV included."""
    model = HFModel(make_module("llama").to(dtype))
    assert model.spec.kv.dtype == dtype
    [ids] = random_prompts([20])
    got = forward_chunks(model, ids, (7,), 3)
    assert got.dtype == torch.float32
    with torch.no_grad():
        wanted = reference("llama")(torch.tensor([ids])).logits[0]
    assert (got - wanted).abs().mean() < 0.15


def test_facts_of_the_spec() -> None:
    """KV that is as wide as the query heads wastes memory; a wrong context length overruns."""
    spec = hf_model("llama").spec
    assert (spec.kv.num_layers, spec.kv.num_kv_heads) == (2, 2)
    assert (spec.kv.key_dim, spec.kv.value_dim) == (8, 8)
    assert (spec.vocab_size, spec.max_model_len) == (VOCAB, MAX_LEN)
    assert spec.num_parameters == sum(p.numel() for p in make_module("llama").parameters())
    assert HFModel(make_module("gpt2"), max_model_len=40).spec.max_model_len == 40
    with pytest.raises(ConfigError, match="positions end at 256"):
        HFModel(make_module("gpt2"), max_model_len=257)


# --- what a tree cannot rewind ---------------------------------------------------------------

_SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
_REFUSED: dict[str, tuple[Any, str]] = {
    "mamba": (lambda: tf.MambaConfig(vocab_size=VOCAB, hidden_size=32), "Mamba"),
    "mamba2": (
        lambda: tf.Mamba2Config(vocab_size=VOCAB, hidden_size=32, num_heads=8, head_dim=8),
        "Mamba2",
    ),
    "qwen3_next": (
        lambda: tf.Qwen3NextConfig(**_SMALL, num_key_value_heads=2),
        "Qwen3Next.*'linear_attention' layers",
    ),
    "recurrent_gemma": (
        lambda: tf.RecurrentGemmaConfig(**{**_SMALL, "num_key_value_heads": 1}),
        "RecurrentGemma",
    ),
    "jamba": (lambda: tf.JambaConfig(**_SMALL, num_key_value_heads=2), "Jamba"),
    "rwkv": (lambda: tf.RwkvConfig(vocab_size=VOCAB, hidden_size=32), "Rwkv"),
    "bloom": (lambda: tf.BloomConfig(vocab_size=VOCAB, hidden_size=32, n_head=4), "Bloom"),
    "falcon": (
        lambda: tf.FalconConfig(vocab_size=VOCAB, num_attention_heads=4, alibi=True),
        "Falcon",
    ),
    "mpt": (lambda: tf.MptConfig(vocab_size=VOCAB, d_model=32, n_heads=4, n_layers=2), "Mpt"),
}  # fmt: skip


@pytest.mark.parametrize("kind", list(_REFUSED))
def test_what_cannot_be_rewound_is_refused_by_name(kind: str) -> None:
    """Recurrent state is corrupted by a partial accept, and ALiBi's biases do not know a tree.

    One line that names the model class or its layers, before any weight is touched.
    """
    make, words = _REFUSED[kind]
    config = make()
    model_class = tf.AutoModelForCausalLM._model_mapping[type(config)]
    with torch.device("meta"):
        module = model_class(config)
    with pytest.raises(UnsupportedModelError, match=words) as error:
        HFModel(module)
    assert "\n" not in str(error.value)
    assert "tree" in str(error.value)


def test_an_encoder_decoder_is_refused() -> None:
    """T5 decodes beside an encoder that nobody feeds."""
    config = tf.T5Config(
        vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4,
        pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    with pytest.raises(UnsupportedModelError, match=r"T5ForConditionalGeneration.*encoder"):
        HFModel(tf.T5ForConditionalGeneration(config))


_BERT = {**_SMALL, "pad_token_id": 0}
_AFMOE = {
    "num_key_value_heads": 2, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "sliding_window": WINDOW,
}  # fmt: skip
# Architectures that looked usable by their class and gave wrong logits or a traceback.
_TRAPS: dict[str, tuple[Any, str | None]] = {
    "encoder": (lambda: tf.BertConfig(**_BERT), "BertSelfAttention looks at what comes later"),
    "encoder with other positions": (lambda: tf.RobertaConfig(**_BERT), "looks at what comes"),
    "two attentions in a layer": (
        lambda: tf.DiffLlamaConfig(**_SMALL, num_key_value_heads=2),
        "DiffLlamaAttention attends more than once per layer",
    ),
    "a window in the mask alone": (
        lambda: tf.PhimoeConfig(
            **_SMALL, num_key_value_heads=2, sliding_window=WINDOW, num_local_experts=4
        ),
        "PhimoeForCausalLM keeps its sliding window to itself",
    ),
    "its own mask": (lambda: tf.DogeConfig(**_SMALL, num_key_value_heads=2), "DogeAttention makes"),
    "no way for the tree": (
        lambda: tf.NemotronConfig(**_SMALL, num_key_value_heads=2, head_dim=8),
        "NemotronAttention drops",
    ),
    "views its result": (lambda: tf.JetMoeConfig(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_key_value_heads=2,
        kv_channels=8, intermediate_size=48, num_local_experts=4,
    ), None),
    "views it too": (lambda: tf.AfmoeConfig(**{**_SMALL, **_AFMOE}), None),
    "reads a layer's weight": (lambda: tf.HunYuanMoEV1Config(
        **{**_SMALL, "pad_token_id": 0, "num_key_value_heads": 2, "head_dim": 8},
        num_experts=4, moe_topk=2,
    ), None),
}  # fmt: skip


@pytest.mark.parametrize("trap", list(_TRAPS))
def test_what_looks_usable_is_right_or_refused(trap: str) -> None:
    """Each of these was accepted once and said something else than transformers, or crashed.

    Refused in one line, or equal to transformers; nothing between.
    """
    make, words = _TRAPS[trap]
    torch.manual_seed(3)
    module = tf.AutoModelForCausalLM.from_config(make(), dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=1.2 / min(parameter.shape[-2:]) ** 0.5)
        module.set_attn_implementation("eager")
        [ids] = random_prompts([3 * WINDOW])
        wanted = module(torch.tensor([ids]), use_cache=False).logits[0]
    _register()
    if words is not None:
        with pytest.raises(UnsupportedModelError, match=words) as error:
            HFModel(module)
        assert "\n" not in str(error.value)
        return
    got = forward_chunks(HFModel(module), ids, (7, 8, 9), 4)
    torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)


class _Wrapped(nn.Module):
    """A model whose forward is bent by `bend`: what a careless architecture would do."""

    def __init__(self, inner: Any, bend: Any) -> None:
        super().__init__()
        self.inner = inner
        self.config = inner.config
        self._bend = bend

    _supports_attention_backend = True

    def set_attn_implementation(self, name: str) -> None:
        """As transformers' models have it."""
        self.inner.set_attn_implementation(name)

    def forward(self, **arguments: Any) -> Any:
        """The inner model's forward with bent arguments or results."""
        return self._bend(self.inner, arguments)


def _ignores_positions(inner: Any, arguments: dict[str, Any]) -> Any:
    rows = arguments["input_ids"].shape[1]
    return inner(**{**arguments, "position_ids": torch.arange(rows)[None]})


def _shifts_last_states(inner: Any, arguments: dict[str, Any]) -> Any:
    """The same behind the last layer, where no KV carries the fault to another row."""
    rows = arguments.pop("logits_to_keep", slice(None))
    states = inner.model(**arguments).last_hidden_state
    shifted = torch.cat([torch.zeros_like(states[:, :1]), states[:, :-1]], dim=1)
    return SimpleNamespace(logits=inner.lm_head((states + 0.5 * shifted)[:, rows]))


def _convolves_tokens(inner: Any, arguments: dict[str, Any]) -> Any:
    """A token shift as RWKV or Canon layers have it: mixes a row with the row before it."""
    ids = arguments.pop("input_ids")
    embedded = inner.get_input_embeddings()(ids)
    shifted = torch.cat([torch.zeros_like(embedded[:, :1]), embedded[:, :-1]], dim=1)
    return inner(inputs_embeds=embedded + 0.5 * shifted, **arguments)


def _says_nan(inner: Any, arguments: dict[str, Any]) -> Any:
    output = inner(**arguments)
    return SimpleNamespace(logits=output.logits * float("nan"))


@pytest.mark.parametrize(
    "bend", [_ignores_positions, _convolves_tokens, _shifts_last_states, _says_nan]
)
def test_the_self_check_catches_a_model_that_does_not_rewind(bend: Any) -> None:
    """Such a model passes every check by name, and would give a wrong text at the first branch."""
    with pytest.raises(UnsupportedModelError, match="computes a branch of a tree differently"):
        HFModel(_Wrapped(make_module("llama"), bend))


def test_the_self_check_lets_an_honest_wrapper_pass() -> None:
    """The fakes above are refused for what they do, not for being fakes."""
    model = HFModel(_Wrapped(make_module("llama"), lambda inner, arguments: inner(**arguments)))
    assert model.spec.vocab_size == VOCAB


def test_a_model_that_hides_its_attention_is_refused() -> None:
    """Keyword arguments that do not reach attention would leave the tree out of it."""

    def drops(inner: Any, arguments: dict[str, Any]) -> Any:
        return inner(**{k: v for k, v in arguments.items() if k != "draftwood_call"})

    with pytest.raises(UnsupportedModelError, match="drops keyword arguments"):
        HFModel(_Wrapped(make_module("llama"), drops))
