"""Hugging Face models: the only file that knows modelling internals.

transformers lets one function stand in for every architecture's attention (`AttentionInterface`).
Ours receives the packed batch and the KV plane as a keyword argument that transformers passes
through untouched, so that no cache class, no mask and no modelling code of transformers is involved
in how a tree is computed. What does not reach that function, or keeps state of its own, is refused.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from draftwood.attention import AttentionRule, Batch, Work, pack, tree_attention
from draftwood.errors import ConfigError, ModelError, UnsupportedModelError, first_line
from draftwood.kv import BlockPool, KVSpec, Lease, Plane
from draftwood.models.base import ModelSpec
from draftwood.models.packed_linear import pack_linears
from draftwood.models.row_exact import make_row_exact
from draftwood.models.sources import ModelFiles
from draftwood.tree import TokenTree

_NAME = "draftwood"
_CHECK_PATH = (11, 37, 53)
_CHECK_STRANGER = (23,)
_REWINDABLE_LAYERS = {"full_attention", "sliding_attention"}


@dataclass(slots=True)
class _Call:
    """What rides through transformers to our attention function."""

    batch: Batch
    plane: Plane | None
    seen: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    windows: set[int | None] = field(default_factory=set)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    draftwood_call: _Call | None = None,
    **other: Any,
) -> tuple[Tensor, None]:
    """transformers' attention signature: [1, heads, N, dim] in, [1, N, heads, dim] out."""
    if draftwood_call is None:
        raise UnsupportedModelError(
            f"{type(module).__name__} drops keyword arguments on the way to attention: "
            "this architecture cannot be used"
        )
    if attention_mask is not None or other.get("position_bias") is not None:
        raise UnsupportedModelError(
            f"{type(module).__name__} makes attention masks or biases of its own: "
            "they do not know the token tree, so this architecture cannot be used"
        )
    if getattr(module, "is_causal", True) is False:
        raise UnsupportedModelError(
            f"{type(module).__name__} looks at what comes later: it is an encoder, not a decoder "
            "(a config with is_decoder may help)"
        )
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    keys, values = key[0].transpose(0, 1), value[0].transpose(0, 1)
    if draftwood_call.plane is None:
        if layer in draftwood_call.seen:
            raise UnsupportedModelError(
                f"{type(module).__name__} attends more than once per layer: this architecture "
                "cannot be used"
            )
        draftwood_call.seen[layer] = (keys.shape[1], keys.shape[2], values.shape[2])
        draftwood_call.windows.add(sliding_window)
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None
    rule = AttentionRule(
        scaling if scaling is not None else query.shape[-1] ** -0.5, sliding_window, softcap, s_aux
    )
    output = tree_attention(
        query[0].transpose(0, 1),
        keys,
        values,
        batch=draftwood_call.batch,
        plane=draftwood_call.plane,
        layer=layer,
        rule=rule,
    )
    # Some modelling code views the result, so it has to be contiguous.
    return output.contiguous()[None], None


class HFModel:
    """A transformers causal language model behind the `Model` protocol.

    Args:
        module: a `PreTrainedModel` in evaluation mode, attention set to ours.
        name: what to call it.
        fingerprint: changes whenever its KV would.
        max_model_len: cap on the sequence length; None takes the model's own.
    """

    def __init__(
        self,
        module: Any,
        *,
        name: str = "model",
        fingerprint: str = "",
        max_model_len: int | None = None,
    ) -> None:
        _register()
        _refuse_unrewindable(type(module), module.config)
        self._module = module.eval()
        self._device = next(module.parameters()).device
        self._dtype = next(module.parameters()).dtype
        reference = self._reference_logits()
        module.set_attn_implementation(_NAME)
        num_parameters = sum(p.numel() for p in module.parameters())
        kv, vocab_size = self._probe()
        self.spec = ModelSpec(
            name=name,
            fingerprint=fingerprint,
            vocab_size=vocab_size,
            max_model_len=checked_length(module.config, max_model_len),
            num_parameters=num_parameters,
            kv=kv,
            dtype=self._dtype,
            device=self._device,
        )
        if self._device.type == "cpu" and self._dtype == torch.float32:
            pack_linears(module)
            make_row_exact(module)
        self._check_rewind(reference)

    @torch.inference_mode()
    def forward(self, batch: Batch, plane: Plane) -> Tensor:
        """Runs the batch; see `Model.forward`."""
        return self._run(_Call(batch, plane)).float()

    def _run(self, call: _Call) -> Tensor:
        output = self._module(
            input_ids=call.batch.token_ids[None],
            position_ids=call.batch.positions[None],
            use_cache=False,
            logits_to_keep=call.batch.logit_rows,
            draftwood_call=call,
        )
        logits: Tensor = output.logits[0]
        return logits

    @torch.inference_mode()
    def _probe(self) -> tuple[KVSpec, int]:
        """Learns the KV's shape from what reaches attention, rather than from config fields."""
        ids = torch.zeros(2, dtype=torch.int64, device=self._device)
        batch = Batch(ids, torch.arange(2, device=self._device), (), ids[:1])
        call = _Call(batch, None)
        try:
            logits = self._run(call)
        except TypeError as error:
            raise UnsupportedModelError(
                f"{type(self._module).__name__} does not take what a token tree needs ({error})"
            ) from error
        self._refuse_hidden_window(call)
        shapes = set(call.seen.values())
        if sorted(call.seen) != list(
            range(self._module.config.get_text_config().num_hidden_layers)
        ):
            raise UnsupportedModelError(
                f"{type(self._module).__name__}: only {len(call.seen)} of its layers use "
                "attention that a token tree can rewind"
            )
        if len(shapes) > 1:
            raise UnsupportedModelError(
                f"{type(self._module).__name__} has layers of different KV shapes {sorted(shapes)}"
            )
        heads, key_dim, value_dim = shapes.pop()
        num_layers = len(call.seen)
        spec = KVSpec(num_layers, heads, key_dim, value_dim, self._dtype, self._device)
        return spec, int(logits.shape[-1])

    def _refuse_hidden_window(self, call: _Call) -> None:
        """Refuses a model whose sliding window is only in masks, which a tree does not use."""
        config = self._module.config.get_text_config()
        if getattr(config, "sliding_window", None) and call.windows == {None}:
            layers = set(getattr(config, "layer_types", None) or ("sliding_attention",))
            if "sliding_attention" in layers:
                raise UnsupportedModelError(
                    f"{type(self._module).__name__} keeps its sliding window to itself: this "
                    "architecture cannot be used"
                )

    @torch.inference_mode()
    def _reference_logits(self) -> Tensor:
        """Logits behind the check's path by transformers alone, before anything is exchanged."""
        self._module.set_attn_implementation("eager")
        ids = torch.tensor([self._check_tokens(_CHECK_PATH)], device=self._device)
        logits: Tensor = self._module(input_ids=ids, use_cache=False).logits[0, -1].float()
        return logits

    def _check_tokens(self, tokens: tuple[int, ...]) -> list[int]:
        size = self._module.config.get_text_config().vocab_size
        return [token % size for token in tokens]

    def _check_rewind(self, reference: Tensor) -> None:
        """Runs a tree, and its path as a chain in two chunks: both must give transformers' logits.

        Catches a model that takes positions from somewhere else than `positions`, or looks at its
        neighbours in the batch, before it can ever give a wrong text. In the tree a stranger stands
        before the last node.
        """
        a, c, d = self._check_tokens(_CHECK_PATH)
        [stranger] = self._check_tokens(_CHECK_STRANGER)
        tree = TokenTree((a, c, stranger, d), (-1, 0, 0, 1), (1.0,) * 4, ("",) * 4)
        pool = BlockPool(self.spec.kv, num_blocks=1)
        limit = 1e-3 if self._dtype == torch.float32 else 0.1
        scale = reference.abs().max().clamp(min=1.0)
        try:
            in_tree = self._last_logits(pool, [(list(tree.tokens), tree)])
            in_chain = self._last_logits(pool, [([a], None), ([c, d], None)])
        except (RuntimeError, NotImplementedError, AttributeError) as error:
            raise UnsupportedModelError(
                f"{type(self._module).__name__} cannot be run on a token tree ({first_line(error)})"
            ) from error
        for logits in (in_tree, in_chain):
            if not bool(((logits - reference).abs().max() / scale) < limit):
                raise UnsupportedModelError(
                    f"{type(self._module).__name__} computes a branch of a tree differently from "
                    "the same tokens alone: it takes positions or state from elsewhere and cannot "
                    "be used"
                )

    def _last_logits(
        self, pool: BlockPool, parts: list[tuple[list[int], TokenTree | None]]
    ) -> Tensor:
        """Logits of the last row after running `parts` one behind the other."""
        lease = Lease.open(pool)
        lease.reserve(pool.block_size)
        for tokens, tree in parts:
            work = Work(lease, lease.length, tokens, tree, [len(tokens) - 1])
            logits = self.forward(pack([work], self._device), pool.target)
            lease.commit(range(len(tokens)))
        lease.close()
        return logits[0]


def load_hf(
    files: ModelFiles,
    *,
    device: torch.device,
    dtype: torch.dtype | None = None,
    max_model_len: int | None = None,
) -> HFModel:
    """Loads a model from a folder.

    Args:
        files: where it lies.
        device: where it shall run.
        dtype: None takes float32 on CPU and the checkpoint's own type elsewhere.
        max_model_len: cap on the sequence length.

    Raises:
        ModelError: the folder cannot be read as a causal language model.
        UnsupportedModelError: the architecture cannot be rewound along a tree.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    _register()
    try:
        config = AutoConfig.from_pretrained(files.path)
    except (ValueError, OSError, KeyError) as error:
        raise ModelError(
            f"{files.name}: its config.json cannot be used ({first_line(error)})"
        ) from error
    mapping = AutoModelForCausalLM._model_mapping
    if type(config) not in mapping:
        raise UnsupportedModelError(
            f"{files.name}: {config.model_type!r} is not a causal language model"
        )
    _refuse_unrewindable(mapping[type(config)], config)
    if dtype is None:
        dtype = torch.float32 if device.type == "cpu" else "auto"  # type: ignore[assignment]
    try:
        module = AutoModelForCausalLM.from_pretrained(
            files.path, dtype=dtype, attn_implementation=_NAME, local_files_only=True
        )
        module = module.to(device)
    except (ValueError, OSError, KeyError, RuntimeError) as error:
        raise ModelError(
            f"{files.name}: its weights cannot be used ({first_line(error)})"
        ) from error
    return HFModel(
        module, name=files.name, fingerprint=files.fingerprint, max_model_len=max_model_len
    )


def _register() -> None:
    from transformers import AttentionInterface
    from transformers.utils.logging import disable_progress_bar

    AttentionInterface.register(_NAME, _attention)
    # What transformers shows while it loads would break our own progress display.
    disable_progress_bar()
    logging.getLogger("transformers").setLevel(logging.ERROR)


def _refuse_unrewindable(model_class: Any, config: Any) -> None:
    """Refuses architectures with state that cannot go back to before a rejected token."""
    name = model_class.__name__
    text_config = config.get_text_config()
    for layer_type in getattr(text_config, "layer_types", None) or ():
        if layer_type not in _REWINDABLE_LAYERS:
            raise UnsupportedModelError(
                f"{name} has {layer_type!r} layers, whose state cannot be rewound along a token "
                "tree: choose a model with attention in every layer"
            )
    if getattr(model_class, "_is_stateful", False):
        raise UnsupportedModelError(
            f"{name} keeps recurrent state (model type {config.model_type!r}), which cannot be "
            "rewound along a token tree: choose a model with attention in every layer"
        )
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{name} is an encoder-decoder model: only decoders are served")
    if not getattr(model_class, "_supports_attention_backend", False):
        raise UnsupportedModelError(
            f"{name} does not let attention be exchanged (transformers' AttentionInterface), so "
            "token trees cannot be run on it"
        )


def checked_length(config: Any, limit: int | None) -> int:
    """The longest sequence: the model's own limit, or a lower one."""
    text_config = config.get_text_config()
    own = getattr(text_config, "max_position_embeddings", None) or 2**17
    if limit is not None and limit > own:
        raise ConfigError(f"max_model_len is {limit}: the model's positions end at {own}")
    return int(limit or own)
