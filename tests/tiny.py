"""Tiny models, tokenizers and engines for tests.

    tiny_llm("llama", drafter="auto", block_size=3)   an LLM over random weights, KV debug mode on
    save_tiny(folder, "qwen2")                        the same as a folder that `LLM(folder)` loads
    reference("gemma2")                               transformers' own model with equal weights

Random weights of the usual size give texts that repeat one token, and a test over such a text
cannot fail. Those here are scaled so that greedy texts wander; `distinct` is asserted by tests.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers as tf
from tokenizers import decoders, models, pre_tokenizers, trainers
from torch import Tensor

from draftwood.attention import Batch
from draftwood.config import EngineConfig
from draftwood.draft.base import Drafter, load_drafter_class
from draftwood.draft.hybrid import AutoDrafter, DraftSource
from draftwood.draft.model import ModelDrafter
from draftwood.draft.synthetic import OracleDrafter, RandomDrafter, ScriptedDrafter
from draftwood.engine.sequence import Sequence as EngineSequence
from draftwood.kv import BlockPool, Plane
from draftwood.llm import LLM
from draftwood.models.base import Model, ModelSpec
from draftwood.models.hf import HFModel, _register
from draftwood.outputs import RequestOutput
from draftwood.sampling import SamplingParams
from draftwood.tree import TokenTree
from draftwood.tree.token_tree import TreeBuilder

VOCAB = 32
WINDOW = 8
MAX_LEN = 256
SEED = 2  # of the weights; with it every architecture's greedy text wanders

_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": MAX_LEN,
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
_GROUPED = {**_SIZES, "num_key_value_heads": 2}
_HEADS = {**_GROUPED, "head_dim": 8}
_MIXED = ["sliding_attention", "full_attention"]
_GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": MAX_LEN}
_NO_IDS = {k: v for k, v in _SIZES.items() if k.endswith("_id") or k.startswith("tie")}

# Architecture to (config class, its arguments besides vocab_size).
ARCHITECTURES: dict[str, tuple[type, dict[str, Any]]] = {
    "llama": (tf.LlamaConfig, _GROUPED),
    "mistral": (tf.MistralConfig, {**_GROUPED, "sliding_window": WINDOW}),
    "qwen2": (tf.Qwen2Config, _GROUPED),
    "qwen3": (tf.Qwen3Config, _HEADS),
    "gemma2": (tf.Gemma2Config, {**_HEADS, "sliding_window": WINDOW, "query_pre_attn_scalar": 8}),
    "gemma3": (
        tf.Gemma3TextConfig,
        {**_HEADS, "sliding_window": WINDOW, "layer_types": _MIXED, "query_pre_attn_scalar": 8},
    ),
    "phi3": (tf.Phi3Config, _GROUPED),
    "gpt2": (tf.GPT2Config, {**_GPT, **_NO_IDS}),
    "opt": (
        tf.OPTConfig,
        {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "ffn_dim": 48,
            "max_position_embeddings": MAX_LEN,
            "word_embed_proj_dim": 32,
            **_NO_IDS,
        },
    ),
    "neox": (tf.GPTNeoXConfig, _SIZES),
    "cohere": (tf.CohereConfig, {**_GROUPED, "logit_scale": 1.0}),
    "cohere2": (
        tf.Cohere2Config,
        {**_GROUPED, "sliding_window": WINDOW, "layer_types": _MIXED, "logit_scale": 1.0},
    ),
    "mixtral": (tf.MixtralConfig, {**_GROUPED, "num_local_experts": 4}),
    "qwen3moe": (
        tf.Qwen3MoeConfig,
        {**_HEADS, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    ),
    "olmo2": (tf.Olmo2Config, _GROUPED),
    "gptoss": (
        tf.GptOssConfig,
        {**_HEADS, "num_local_experts": 4, "sliding_window": WINDOW, "layer_types": _MIXED},
    ),
    "starcoder2": (tf.Starcoder2Config, _GROUPED),
    "gptj": (tf.GPTJConfig, {**_GPT, "rotary_dim": 4, **_NO_IDS}),
    "granite": (tf.GraniteConfig, _GROUPED),
}
# Added to the seed of the weights where the text of the usual one hardly moves.
_NOISE = {"cohere": -1, "cohere2": -1}
WINDOWED = ("mistral", "gemma2", "gemma3", "cohere2", "gptoss")


def make_module(
    arch: str, *, vocab_size: int = VOCAB, seed: int = SEED, calm: bool = False, **changes: Any
) -> Any:
    """A transformers model of a tiny size with random weights, in float32.

    Lively weights make lively texts, and blow up rounding errors; with `calm` ones logits are
    comparable to 1e-5.
    """
    _register()
    config_class, arguments = ARCHITECTURES[arch]
    config = config_class(vocab_size=vocab_size, **{**arguments, **changes})
    torch.manual_seed(seed)
    # The module may be kept for other tests, which may want gradients: no inference tensors.
    with torch.inference_mode(mode=False):
        module = tf.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        _liven(module, seed + _NOISE.get(arch, 1), calm)
    return module


def _liven(module: Any, seed: int, calm: bool) -> None:
    """Scales weights so that attention and the layers outweigh the token that was read last."""
    width, gain = (1.0, 1.0) if calm else (0.3, 3.0)
    noise = torch.Generator().manual_seed(seed)
    head = module.get_output_embeddings().weight
    embedding = module.get_input_embeddings().weight
    assert head is not embedding, "tied weights echo the token that was read"
    with torch.no_grad():
        for parameter in module.parameters():
            fresh = torch.randn(parameter.shape, generator=noise)
            if parameter.dim() < 2:
                parameter.add_(fresh * 0.1)
            elif parameter is head:
                parameter.copy_(fresh * 2.5 / parameter.shape[-1] ** 0.5)
            elif parameter is embedding:
                parameter.copy_(fresh * width)
            else:
                parameter.copy_(fresh * gain / min(parameter.shape[-2:]) ** 0.5)


@lru_cache(maxsize=64)
def reference(arch: str, *, vocab_size: int = VOCAB, seed: int = SEED, calm: bool = False) -> Any:
    """transformers' own model, eager attention: what ours must equal. Do not change it."""
    module = make_module(arch, vocab_size=vocab_size, seed=seed, calm=calm)
    module.set_attn_implementation("eager")
    return module


@lru_cache(maxsize=64)
def hf_model(
    arch: str = "llama", *, vocab_size: int = VOCAB, seed: int = SEED, calm: bool = False
) -> HFModel:
    """The same weights as `reference` behind draftwood's `Model` protocol."""
    return HFModel(
        make_module(arch, vocab_size=vocab_size, seed=seed, calm=calm),
        name=arch,
        fingerprint=f"{arch}:{vocab_size}:{seed}:{calm}",
    )


def greedy_reference(
    arch: str, prompt: Sequence[int], num_tokens: int, *, vocab_size: int = VOCAB, seed: int = SEED
) -> list[int]:
    """What `transformers.generate` continues a prompt with."""
    module = reference(arch, vocab_size=vocab_size, seed=seed)
    ids = torch.tensor([list(prompt)])
    output = module.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        generation_config=tf.GenerationConfig(
            max_new_tokens=num_tokens, do_sample=False, pad_token_id=0, eos_token_id=None
        ),
    )
    return [int(token) for token in output[0, len(prompt) :]]


class LetterTokenizer:
    """One token, one character: id 0 is "a". Ids from `special` are special and have no text."""

    def __init__(
        self, vocab_size: int = VOCAB, *, eos: Sequence[int] = (), special: Sequence[int] = ()
    ) -> None:
        self._size = vocab_size
        self.eos_token_ids = frozenset(eos)
        self.special_ids = frozenset({*eos, *special})
        self.has_chat_template = False

    def __len__(self) -> int:
        return self._size

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of the characters."""
        return [ord(letter) - ord("a") for letter in text]

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The characters of the ids."""
        return "".join(
            chr(ord("a") + token)
            for token in tokens
            if not (skip_special_tokens and token in self.special_ids)
        )

    @property
    def token_strings(self) -> list[str | None]:
        """The character of each id."""
        return [chr(ord("a") + token) for token in range(self._size)]


class CountingModel:
    """A model that notes the rows and positions of every forward."""

    def __init__(self, inner: Model) -> None:
        self._inner = inner
        self.rows: list[int] = []
        self.positions: list[list[int]] = []

    @property
    def spec(self) -> ModelSpec:
        """The inner model's facts."""
        return self._inner.spec

    @property
    def num_rows(self) -> int:
        """Rows of all forwards since the last `clear`."""
        return sum(self.rows)

    def clear(self) -> None:
        """Forgets what was counted."""
        self.rows.clear()
        self.positions.clear()

    def forward(self, batch: Batch, plane: Plane) -> Tensor:
        """Counts and passes on."""
        self.rows.append(batch.num_rows)
        self.positions.append(batch.positions.tolist())
        return self._inner.forward(batch, plane)


class TinyLLM(LLM):
    """An `LLM` made of given parts instead of files, with KV debug mode on."""

    def __init__(
        self,
        model: Model,
        *,
        draft: Model | None,
        drafter: str | Drafter,
        tokenizer: Any,
        num_blocks: int | None,
        config: EngineConfig,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.model = model
        self.draft_model = draft
        self.pool = BlockPool(
            model.spec.kv,
            draft.spec.kv if draft else None,
            num_blocks=num_blocks or 4 * model.spec.max_model_len // config.block_size,
            block_size=config.block_size,
            debug=True,
        )
        self.tiers = self._make_tiers()
        self.engine = self.make_engine(self._tiny_drafter(drafter))

    def _tiny_drafter(self, drafter: str | Drafter) -> Drafter:
        if isinstance(drafter, Drafter):
            return drafter
        if drafter == "random":
            return RandomDrafter(self.model.spec.vocab_size)
        if drafter == "bushy":
            return bushy_drafter(self.model.spec.vocab_size)
        if drafter == "model":
            assert self.draft_model is not None, "give draft="
            return ModelDrafter(self.draft_model, self.pool, self.draft_model.spec.vocab_size)
        if drafter == "auto":
            draft, size = self.draft_model, self.model.spec.vocab_size
            source = DraftSource(draft, self.pool, size) if draft else None
            # A clock that stands still: asking the draft model costs nothing.
            return AutoDrafter(source, clock=lambda: 0.0)
        return load_drafter_class(drafter)()

    def run(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams]
    ) -> list[list[int]]:
        """Generates for all prompts in one batch; the token ids."""
        return [list(output.token_ids) for output in self.outputs(prompts, params)]

    def outputs(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams]
    ) -> list[RequestOutput]:
        """Generates for all prompts in one batch; afterwards the books of the pool must balance."""
        given = params if isinstance(params, SamplingParams) else list(params)
        outputs = self.generate([list(prompt) for prompt in prompts], given)
        self.pool.check()
        return outputs


def tiny_llm(
    arch: str | Model = "llama",
    *,
    draft: str | Model | None = None,
    drafter: str | Drafter | None = None,
    tokenizer: Any = None,
    vocab_size: int = VOCAB,
    seed: int = SEED,
    num_blocks: int | None = None,
    **config: Any,
) -> TinyLLM:
    """A small LLM over random weights.

    Args:
        arch: a key of `ARCHITECTURES`, or a model.
        draft: the same for a draft model; a name gets other weights than the target's.
        drafter: a registered name, "random", "bushy" (wide trees, often right), or a `Drafter`;
            None takes "model" when `draft` is given, else "auto".
        tokenizer: None takes a `LetterTokenizer` without an end token.
        vocab_size, seed: of the models.
        num_blocks: of the pool; None takes room for four full contexts.
        config: fields of `EngineConfig`; adaptive is off unless asked for.
    """
    model = hf_model(arch, vocab_size=vocab_size, seed=seed) if isinstance(arch, str) else arch
    if isinstance(draft, str):
        draft = hf_model(draft, vocab_size=vocab_size, seed=seed + 1000)
    settings = EngineConfig(**{"adaptive": False, "debug_kv": True, **config})
    return TinyLLM(
        model,
        draft=draft,
        drafter=drafter or ("model" if draft else "auto"),
        tokenizer=tokenizer or LetterTokenizer(vocab_size),
        num_blocks=num_blocks,
        config=settings,
    )


def random_prompts(
    lengths: Sequence[int], *, vocab_size: int = VOCAB, seed: int = 0
) -> list[list[int]]:
    """Prompts of the given lengths: random, with a stretch that repeats."""
    rng = random.Random(seed)
    prompts = []
    for length in lengths:
        prompt = [rng.randrange(vocab_size) for _ in range(length)]
        third = length // 3
        prompt[length - third :] = prompt[:third]
        prompts.append(prompt)
    return prompts


def distinct(tokens: Sequence[int]) -> int:
    """How many different tokens there are: a text of one token proves nothing."""
    return len(set(tokens))


def oracle(answers: dict[tuple[int, ...], list[int]], length: int = 8) -> OracleDrafter:
    """A drafter that is always right. `answers`: prompt to what follows it."""
    return OracleDrafter({p: [*p, *rest] for p, rest in answers.items()}, length)


def near_oracle(
    answers: dict[tuple[int, ...], list[int]], vocab_size: int = VOCAB, seed: int = 0
) -> ScriptedDrafter:
    """A drafter of branching trees that hold the answer, amid wrong nodes, to a random depth."""
    rng = random.Random(seed)

    def script(seq: Any, budget: int) -> TokenTree:
        answer = answers[tuple(seq.tokens[: seq.num_prompt_tokens])]
        rest = answer[len(seq.tokens) - seq.num_prompt_tokens :]
        builder, spine = TreeBuilder(seq.tokens[-1]), 0
        depth = rng.randrange(len(rest) + 1)
        while len(builder) <= budget:
            if depth and rest and rng.random() < 0.5:
                spine = builder.add(spine, rest[0], 0.9 * builder.scores[spine], "right")
                depth, rest = depth - 1, rest[1:]
            else:
                parent = rng.randrange(len(builder))
                token = rng.randrange(vocab_size)
                builder.add(parent, token, 0.9 * builder.scores[parent], "wrong")
        return builder.build()

    return ScriptedDrafter(script)


def bushy_drafter(vocab_size: int, seed: int = 0) -> ScriptedDrafter:
    """Wide random trees: with a small vocabulary many branches are right, at any place in order."""
    rng = random.Random(seed)

    def script(seq: Any, budget: int) -> TokenTree:
        builder = TreeBuilder(seq.tokens[-1])
        width = max(2, vocab_size // 2)
        for _ in range(4 * budget):
            if len(builder) > budget:
                break
            parent = rng.randrange(max(1, len(builder) // width + 1))
            token = rng.randrange(vocab_size)
            builder.add(parent, token, 0.9 * builder.scores[parent], "bushy")
        return builder.build()

    return ScriptedDrafter(script)


def run_until(llm: LLM, seqs: Sequence[EngineSequence]) -> None:
    """Steps an engine until all of `seqs` are finished."""
    for _ in range(10_000):
        if all(seq.finished for seq in seqs):
            return
        llm.engine.step()
    raise AssertionError("the engine makes no progress")


# --- a folder that LLM(folder) loads ---------------------------------------------------------

BPE_VOCAB = 320
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CORPUS = (
    "the quick brown fox jumps over the lazy dog",
    "a tree of tokens is verified in one pass of the target",
    "def add(first, second): return first + second",
    "naïve café: ÄÖÜ äöü ß, 東京 and 🌲🌲",
    "user and assistant and system speak in turn",
)


@lru_cache(maxsize=4)
def bpe_backend(vocab_size: int = BPE_VOCAB) -> tf.PreTrainedTokenizerFast:
    """A real byte-level BPE tokenizer with end tokens and a chat template."""
    bpe = tokenizers.Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(CORPUS * 4, trainer)
    backend = tf.PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
    )
    backend.chat_template = CHAT_TEMPLATE
    return backend


def save_tiny(
    folder: Path,
    arch: str = "llama",
    *,
    seed: int = SEED,
    vocab_size: int = BPE_VOCAB,
    backend: Any = None,
) -> Path:
    """Writes a tiny model with its tokenizer into `folder`; `LLM(str(folder))` loads it."""
    folder.mkdir(parents=True, exist_ok=True)
    backend = backend or bpe_backend()
    module = make_module(
        arch,
        vocab_size=vocab_size,
        seed=seed,
        bos_token_id=backend.bos_token_id,
        eos_token_id=backend.eos_token_id,
        pad_token_id=backend.pad_token_id,
    )
    module.save_pretrained(folder)
    backend.save_pretrained(folder)
    ids = (backend.eos_token_id, backend.pad_token_id)
    ends = {"eos_token_id": [token for token in ids if token is not None]}
    (folder / "generation_config.json").write_text(json.dumps(ends), encoding="utf-8")
    return folder
