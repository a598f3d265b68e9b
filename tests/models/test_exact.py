"""A node of a tree gets the bits of plain decoding: on CPU, in float32 and quantised."""

from __future__ import annotations

import random
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor

from draftwood.attention import Work, exact, pack
from draftwood.kernels import ops
from draftwood.kv import BlockPool, Lease
from draftwood.models.base import Model
from draftwood.models.formats import Bits, file_name
from draftwood.models.hf import HFModel
from draftwood.models.quantised import QuantisedModel
from draftwood.models.quantised_convert import pack_checkpoint
from draftwood.models.row_exact import make_row_exact
from draftwood.sampling import SamplingParams
from draftwood.tree import TokenTree
from draftwood.tree.token_tree import TreeBuilder
from tests import tiny


def random_tree(rng: random.Random, size: int, vocab_size: int) -> TokenTree:
    builder = TreeBuilder(rng.randrange(vocab_size))
    while len(builder) < size:
        builder.add(rng.randrange(len(builder)), rng.randrange(vocab_size), 1.0)
    return builder.build()


class Runner:
    """Runs one model over chunks and trees on a pool of its own."""

    def __init__(self, model: Model, block_size: int = 16, holes: bool = False) -> None:
        self.model = model
        self.pool = BlockPool(model.spec.kv, num_blocks=2048, block_size=block_size, debug=True)
        if holes:
            self.pool.release([self.pool.take() for _ in range(2048)][::2])

    def lease(self, chunks: list[list[int]]) -> Lease:
        lease = Lease.open(self.pool)
        for chunk in chunks:
            self.run(lease, chunk)
        return lease

    def run(self, lease: Lease, tokens: list[int]) -> Tensor:
        """Logits of all rows of a chunk, which is then committed."""
        lease.reserve(len(tokens))
        work = Work(lease, lease.length, tokens, None, range(len(tokens)))
        logits = self.model.forward(pack([work], self.pool.device), self.pool.target)
        lease.commit(range(len(tokens)))
        return logits

    def trees(self, items: list[tuple[Lease, TokenTree]]) -> list[Tensor]:
        """Logits of every node of several sequences' trees, in one packed forward."""
        works = []
        for lease, tree in items:
            lease.reserve(len(tree))
            works.append(Work(lease, lease.length, tree.tokens, tree, range(len(tree))))
        logits = self.model.forward(pack(works, self.pool.device), self.pool.target)
        return list(torch.split(logits, [len(tree) for _, tree in items]))


def check_exactness(model: Model, seed: int = 0, context: int = 70) -> None:
    """Everything the promise covers, with `torch.equal`."""
    rng = random.Random(seed)
    vocab_size = model.spec.vocab_size
    prompt = [rng.randrange(vocab_size) for _ in range(context)]
    other = [rng.randrange(vocab_size) for _ in range(23)]
    runner, scattered = Runner(model), Runner(model, block_size=3, holes=True)
    whole = runner.run(runner.lease([]), prompt)
    parts = scattered.lease([prompt[:1], prompt[1:9]])
    assert torch.equal(scattered.run(parts, prompt[9:]), whole[9:]), "a chunked prompt"
    for size in (1, 2, 3, 7, 16, 33, 64):
        tree = random_tree(rng, size, vocab_size)
        mate = random_tree(rng, rng.randrange(1, 9), vocab_size)
        [alone] = runner.trees([(runner.lease([prompt]), tree)])
        _, packed = scattered.trees(
            [(scattered.lease([other]), mate), (scattered.lease([prompt]), tree)]
        )
        assert torch.equal(alone, packed), "batch mates and slots"
        for node in {0, size // 2, size - 1}:
            lease = runner.lease([prompt])
            for token in [tree.tokens[i] for i in tree.path(node)]:
                plain = runner.run(lease, [token])
            assert torch.equal(plain[0], alone[node]), "plain decoding"
            lease.close()


_SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}
CONFIGS: dict[str, Any] = {
    "llama": tf.LlamaConfig(**_SIZES),
    "mistral": tf.MistralConfig(**_SIZES, sliding_window=24),
    "qwen2": tf.Qwen2Config(**_SIZES),
    "qwen3": tf.Qwen3Config(**_SIZES, head_dim=16),
    "gemma2": tf.Gemma2Config(**_SIZES, head_dim=16, sliding_window=24),
    "phi3": tf.Phi3Config(**_SIZES),
    "gpt2": tf.GPT2Config(vocab_size=96, n_embd=64, n_layer=2, n_head=4, n_positions=512),
}


def make_module(arch: str) -> Any:
    """Random weights; a config of its own, as loading a model changes it."""
    torch.manual_seed(0)
    config = deepcopy(CONFIGS[arch])
    return tf.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


@pytest.mark.parametrize("arch", CONFIGS)
def test_float32_is_exact_bit_for_bit(arch: str) -> None:
    assert ops.available(), "the CPU kernels cannot be built here"
    module = make_module(arch)
    check_exactness(HFModel(module))


WIDTH = {"hidden_size": 64}
HEADS = {**WIDTH, "head_dim": 16}
DENSE: dict[str, dict[str, Any]] = {
    "llama": WIDTH,
    "gemma3": {**HEADS, "query_pre_attn_scalar": 16},
    "opt": {**WIDTH, "word_embed_proj_dim": 64},
    "neox": WIDTH,
    "cohere": WIDTH,
    "cohere2": WIDTH,
    "olmo2": WIDTH,
    "starcoder2": WIDTH,
    "gptj": {"n_embd": 64, "rotary_dim": 8},
    "granite": WIDTH,
}


@pytest.mark.parametrize("arch", DENSE)
def test_odd_widths_are_exact_too(arch: str) -> None:
    """The layers between are 48 wide, where PyTorch's own SiLU depends on the number of rows."""
    check_exactness(HFModel(tiny.make_module(arch, vocab_size=96, **DENSE[arch])))


@pytest.mark.parametrize("name", ["silu", "swish", "gelu_pytorch_tanh", "quick_gelu", "sigmoid"])
@pytest.mark.parametrize(("threads", "width"), [(1, 48), (3, 4864), (7, 1536), (16, 8960)])
def test_activations_do_not_depend_on_rows_or_threads(name: str, threads: int, width: int) -> None:
    """A thread's share ends somewhere: those elements must not be computed in another way."""
    module = torch.nn.Sequential(tf.activations.ACT2FN[name])
    x = torch.randn(40, width, generator=torch.Generator().manual_seed(3)) * 3
    theirs = module(x)
    assert make_row_exact(module) == 1
    alone = torch.stack([module(row.clone()) for row in x])
    torch.testing.assert_close(alone, theirs, atol=1e-6, rtol=1e-5)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        for n in (2, 3, 5, 8, 11, 16, 24, 33, 40):
            assert torch.equal(module(x[:n].clone()), alone[:n])
    finally:
        torch.set_num_threads(before)


def test_activations_at_the_ends_of_their_range() -> None:
    """No NaN where exp overflows."""
    x = torch.tensor([-1e30, -200.0, -1e-30, 0.0, 1e-30, 200.0, 1e30])
    for name in ("silu", "gelu_pytorch_tanh", "quick_gelu", "sigmoid"):
        module = torch.nn.Sequential(tf.activations.ACT2FN[name])
        theirs = module(x)
        make_row_exact(module)
        torch.testing.assert_close(module(x), theirs)


@pytest.mark.parametrize("arch", CONFIGS)
def test_float32_without_the_kernels_keeps_the_stated_tolerance(
    arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a compiler a branch of a tree may differ from plain decoding by less than 1e-4."""
    monkeypatch.setattr(exact, "fits", lambda *args: False)
    rng = random.Random(1)
    runner = Runner(HFModel(make_module(arch)))
    prompt = [rng.randrange(96) for _ in range(70)]
    tree = random_tree(rng, 24, 96)
    [in_tree] = runner.trees([(runner.lease([prompt]), tree)])
    for node in range(0, 24, 5):
        lease = runner.lease([prompt[:9], prompt[9:]])
        for token in [tree.tokens[i] for i in tree.path(node)]:
            plain = runner.run(lease, [token])
        torch.testing.assert_close(in_tree[node], plain[0], atol=1e-4, rtol=0)


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3", "mistral"])
@pytest.mark.parametrize("bits", ["int8", "int4"])
def test_quantised_is_exact_bit_for_bit(arch: str, bits: Bits, tmp_path: Path) -> None:
    check_exactness(quantised_model(make_module(arch), bits, tmp_path))


@pytest.mark.parametrize("form", ["float32", "int8"])
def test_beams_have_the_same_bits_in_any_company(form: str, tmp_path: Path) -> None:
    """Their scores are sums of all logits that were read: equal ones mean equal bits throughout."""
    module = make_module("mistral")
    quantised = form == "int8"
    model = quantised_model(module, "int8", tmp_path) if quantised else HFModel(module)
    params = SamplingParams(max_tokens=40, num_beams=4, num_return_sequences=4)
    prompts = [[*range(1, 30)], [7, 5, 3], [9] * 60]
    together = tiny.tiny_llm(model, vocab_size=96, block_size=3, max_batch_tokens=23)
    for prompt, output in zip(prompts, together.outputs(prompts, params), strict=True):
        [alone] = tiny.tiny_llm(model, vocab_size=96).outputs([prompt], params)
        for one, other in zip(
            (output, *output.alternatives), (alone, *alone.alternatives), strict=True
        ):
            assert (one.token_ids, one.score) == (other.token_ids, other.score)


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3", "mistral"])
@pytest.mark.parametrize(("bits", "tolerance"), [("int8", 0.05), ("int4", 0.3)])
def test_quantised_says_nearly_what_float32_says(
    arch: str, bits: Bits, tolerance: float, tmp_path: Path
) -> None:
    """A weight in the wrong place would be exact and wrong."""
    module = make_module(arch)
    _liven_biases(module)
    ids = torch.randint(0, 96, (1, 60))
    with torch.inference_mode():
        expected = module(input_ids=ids).logits[0]
    model = quantised_model(module, bits, tmp_path)
    runner = Runner(model)
    logits = runner.run(runner.lease([]), ids[0].tolist())
    error = (logits - expected).norm() / expected.norm()
    assert error < tolerance


def _liven_biases(module: Any) -> None:
    """Biases start at zero; one in the wrong place would not show."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.5)


def quantised_model(module: Any, bits: Bits, folder: Path) -> QuantisedModel:
    """The quantised form of a float module."""
    path = folder / file_name(bits)
    tensors = [(n, t) for n, t in module.state_dict().items() if n != "lm_head.weight"]
    if not module.config.tie_word_embeddings:
        tensors.append(("lm_head.weight", module.state_dict()["lm_head.weight"]))
    pack_checkpoint(module.config, tensors, path, "tiny", bits)
    return QuantisedModel(module.config, path, bits)
