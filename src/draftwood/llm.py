"""The library's face: load a model, generate."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, Self, get_args

from draftwood.arguments import (
    Prompt,
    device_of,
    drafter_choice,
    dtype_of,
    prompt_list,
    spread,
    with_given,
)
from draftwood.config import EngineConfig
from draftwood.draft.base import Drafter, load_drafter_class
from draftwood.draft.foreign import ForeignDrafter, Match
from draftwood.draft.fused import FusedDrafter
from draftwood.draft.hybrid import AutoDrafter, DraftSource
from draftwood.draft.model import ModelDrafter
from draftwood.draft.vocabulary import Bridge, shared_vocabulary
from draftwood.engine.checkpoint import CheckpointWriter, Maker, Offset
from draftwood.engine.costs import CostModel, cost_model
from draftwood.engine.engine import Engine
from draftwood.engine.sequence import Sequence as EngineSequence
from draftwood.errors import ConfigError
from draftwood.grammars import GrammarCompiler
from draftwood.kv import BlockPool, KVSpec
from draftwood.kv.tiers import KVTiers, Labels, check_compression, make_tiers
from draftwood.models.base import Model
from draftwood.models.load import Placement, load_model
from draftwood.models.memory import available_bytes
from draftwood.models.progress import Progress
from draftwood.outputs import Delta, RequestOutput, make_delta, make_output
from draftwood.sampling import SamplingParams
from draftwood.text import Tokenizer

Messages = Sequence[Mapping[str, Any]]


class LLM:
    """A model that answers faster and says the same.

    Args:
        model: a packaged alias ("smollm2-135m"), a hub id, a folder or a `.gguf` file.
        draft: a second, smaller model to draft with; same forms. Its vocabulary may be another.
        drafter: "auto", "suffix", "recycling", "model", "none", another registered name, or a
            `Drafter`. "auto", the default, uses the draft model where it pays, if there is one.
        draft_match: how a draft model of another vocabulary is understood: by "tokens" that both
            have, by "text", or "auto", which takes text unless the vocabularies are nearly equal.
        device: "cpu", "cuda", "cuda:1", ...; None takes CUDA when there is one.
        dtype: "float32", "bfloat16", "float16"; None takes float32 on CPU and the checkpoint's
            own type elsewhere.
        quantization: "int8" (on CPU: 8-bit weights and activations), "int4" (4-bit weights: smaller
            and faster, and further from the original), "none", or None, which takes 8 bits for
            models above 300 M parameters on a CPU.
        draft_quantization: the same for the draft model; None takes 4 bits on a CPU,
            or 8 for models below 300 M parameters.
        max_model_len: cap on the sequence length.
        kv_memory, kv_disk, kv_disk_bytes, kv_redis, kv_compression, kv_ttl_s: where KV is kept, in
            which form and for how long; see `EngineConfig`, whose values they replace.
        checkpoint: folder in which running requests are saved, for `resume` in a later process;
            their KV goes to `kv_disk`, by default a folder in it.
        checkpoint_every_s: seconds between two checkpoints.
        config: further limits and switches.
        progress: told about downloads and conversions.

    Raises:
        ModelError: the model cannot be found or used.
        VocabularyError: the draft model has another vocabulary, and one of the two tokenizers does
            not say what bytes its tokens are.
        ConfigError: an argument is out of its range.
        CapacityError: memory or disk is too small.
        CheckpointError: the checkpoint is of another model or version, or damaged.

    Attributes:
        checkpoints: saves running requests; None without `checkpoint`.
        draft_match: as given.
        draft_cost: what the draft model's forwards take, once a drafter has it; None without one.
    """

    checkpoints: CheckpointWriter | None = None
    draft_match: Match = "auto"
    draft_cost: CostModel | None = None

    def __init__(
        self,
        model: str,
        *,
        draft: str | None = None,
        drafter: str | Drafter | None = None,
        draft_match: Match = "auto",
        device: str | None = None,
        dtype: str | None = None,
        quantization: str | None = None,
        draft_quantization: str | None = None,
        max_model_len: int | None = None,
        kv_memory: int | None = None,
        kv_disk: str | os.PathLike[str] | None = None,
        kv_disk_bytes: int | None = None,
        kv_redis: str | None = None,
        kv_compression: str | None = None,
        kv_ttl_s: float | None = None,
        checkpoint: str | os.PathLike[str] | None = None,
        checkpoint_every_s: float = 5.0,
        config: EngineConfig | None = None,
        progress: Progress | None = None,
    ) -> None:
        drafter = drafter_choice(drafter, draft)
        if draft_match not in get_args(Match):
            raise ConfigError(f"draft_match is {draft_match!r}: use auto, tokens or text")
        self.draft_match = draft_match
        placement = Placement(device_of(device), dtype_of(dtype), quantization, max_model_len)
        self.config = with_given(
            config or EngineConfig(debug_kv=bool(os.environ.get("DRAFTWOOD_DEBUG_KV"))),
            kv_memory=kv_memory,
            kv_disk=None if kv_disk is None else os.fspath(kv_disk),
            kv_disk_bytes=kv_disk_bytes,
            kv_redis=kv_redis,
            kv_compression=kv_compression,
            kv_ttl_s=kv_ttl_s,
        )
        if checkpoint is not None and self.config.kv_disk is None:
            self.config = replace(self.config, kv_disk=os.path.join(checkpoint, "kv"))
        self.model, files, self.choice = load_model(model, placement, progress)
        self.tokenizer = Tokenizer.load(files.path)
        self.draft_model: Model | None = None
        self.vocabulary: int | Bridge = 0
        if draft is not None:
            other = replace(
                placement, quantization=draft_quantization, max_model_len=None, draft=True
            )
            self.draft_model, draft_files, _ = load_model(draft, other, progress)
            self.vocabulary = self._compare(Tokenizer.load(draft_files.path))
        if checkpoint is not None:
            maker = Maker.of(self.model.spec, self._draft_identity)
            self.checkpoints = CheckpointWriter(checkpoint, maker, every_s=checkpoint_every_s)
        self._drafter: Callable[[], Drafter] = (
            partial(self.make_drafter, drafter) if isinstance(drafter, str) else lambda: drafter
        )
        self._start()

    def _start(self) -> None:
        self.pool = self._make_pool()
        self.tiers = self._make_tiers()
        self.engine = self.make_engine(self._drafter())
        if self.checkpoints is not None:
            self.checkpoints.observe(self.engine, self.tiers)

    def restart(self) -> None:
        """Replaces an engine that has failed: the same weights, with fresh KV memory and drafter.

        What the old one ran is lost, and nothing of its KV is kept: it may be half written. A
        `Drafter` that the user gave is taken again as it is.
        """
        if self.tiers is not None:
            self.tiers.close()
        del self.engine, self.pool  # before as much memory is taken again
        gc.collect()
        self._start()

    def make_drafter(self, name: str, match: Match | None = None) -> Drafter:
        """A fresh drafter for `make_engine`.

        Args:
            name: "auto", "model" or another registered name.
            match: see `draft_match` of the class, which None takes.

        Raises:
            ConfigError: there is no such drafter, or it needs a draft model and there is none.
        """
        if name not in ("auto", "model"):
            return load_drafter_class(name)()
        if self.draft_model is None:
            if name == "model":
                raise ConfigError("drafter 'model' needs a draft model: give draft=")
            return AutoDrafter()
        if isinstance(self.vocabulary, int):
            cost = self._measure_draft(self.pool)
            source = DraftSource(self.draft_model, self.pool, self.vocabulary, cost)
            return (
                AutoDrafter(source)
                if name == "auto"
                else ModelDrafter(self.draft_model, self.pool, self.vocabulary, cost)
            )
        pool = self._blocks(self.draft_model.spec.kv, None, _more(self.pool.num_blocks))
        cost = self._measure_draft(pool)
        foreign = ForeignDrafter(
            self.draft_model, pool, self.vocabulary, match or self.draft_match, cost
        )
        return FusedDrafter(foreign) if name == "auto" else foreign

    def _measure_draft(self, pool: BlockPool) -> CostModel | None:
        """What the draft model's forwards cost, measured or from the cache; None if nobody asks."""
        assert self.draft_model is not None
        if self.config.adaptive and self.config.max_tree_nodes and self.draft_cost is None:
            self.draft_cost = cost_model(self.draft_model, pool, draft=True)
        return self.draft_cost

    def make_engine(self, drafter: Drafter, config: EngineConfig | None = None) -> Engine:
        """Another engine on the same weights and KV memory, with another drafter.

        Close it when it is done: until then its cached prefixes take memory from the others.
        `config` stands in the place of the LLM's own; what it says of KV memory is not looked at.
        """
        return Engine(
            self.model,
            self.tokenizer,
            drafter,
            self.pool,
            config or self.config,
            self.tiers,
            self._grammars,
        )

    @cached_property
    def _grammars(self) -> GrammarCompiler:
        """Compiled grammars, which all engines share."""
        return GrammarCompiler(self.tokenizer, self.model.spec.vocab_size)

    def close(self) -> None:
        """Ends all requests, frees their KV, and writes what is still on its way to the stores.

        That takes ten seconds at most. An `LLM` is also a context manager that does this. With
        `checkpoint`, requests that have not ended are saved first.
        """
        if self.checkpoints is not None:
            self.checkpoints.close()
        self.engine.close()
        if self.tiers is not None:
            self.tiers.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Completes prompts, all in one packed batch.

        Args:
            prompts: texts or lists of token ids; one alone counts as a list of one.
            params: for all prompts, or one for each.

        Returns:
            One output per prompt, in order.
        """
        listed = prompt_list(prompts)
        return self._run([self._encode(p) for p in listed], spread(params, listed))

    def chat(self, messages: Messages, params: SamplingParams | None = None) -> RequestOutput:
        """Answers a conversation; what was said before is not computed again."""
        [output] = self._run([self.tokenizer.encode_chat(messages)], [params or SamplingParams()])
        return output

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Delta]:
        """Completes a prompt piece by piece. Closing the iterator ends the request."""
        return self._stream(self._encode(prompt), params or SamplingParams())

    def stream_chat(
        self, messages: Messages, params: SamplingParams | None = None
    ) -> Iterator[Delta]:
        """Answers a conversation piece by piece."""
        return self._stream(self.tokenizer.encode_chat(messages), params or SamplingParams())

    def resume(self) -> list[RequestOutput]:
        """Goes on with what an earlier process left in the checkpoint; all in one packed batch.

        Returns:
            One output per request, in the order in which they first came, those that had ended
            included. Empty where there is nothing to go on with.

        Raises:
            ConfigError: there is no `checkpoint`, or a request does not fit the KV memory.
        """
        from draftwood.resume import resume_outputs

        return resume_outputs(self)

    def resume_stream(self, received: Mapping[str, Offset] | None = None) -> Iterator[Delta]:
        """The same piece by piece, those of all requests as they come.

        Args:
            received: how much of each output its reader has, by request id, as `Delta.end` said:
                pieces begin there, nothing comes twice and nothing is left out. Without it they
                begin at what the checkpoint knew to be delivered.
        """
        from draftwood.resume import resume_deltas

        return resume_deltas(self, received or {})

    def _run(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
    ) -> list[RequestOutput]:
        groups = self._add_all(prompts, params)
        seqs = [seq for group in groups for seq in group]
        if self.checkpoints is not None:
            self.checkpoints.save()  # from here on none of them can be lost
        self._finish(seqs)
        self._forget(seqs)
        return [make_output(group[0], group[1:]) for group in groups]

    def _stream(self, prompt_ids: Sequence[int], params: SamplingParams) -> Iterator[Delta]:
        if params.n > 1:
            raise ConfigError(f"n is {params.n}: a stream has one output; use generate")
        # Checked now, queued when the first piece is asked for: a stream that is never read must
        # not leave a request behind.
        return self._deltas(self.engine.make(prompt_ids, params))

    def _deltas(self, seq: EngineSequence) -> Iterator[Delta]:
        self.engine.submit(seq)
        try:
            have = Offset()
            while not seq.finished:
                self.engine.step()
                delta = make_delta(seq, have)
                if delta is not None:
                    yield delta
                    have = delta.end
                    if self.checkpoints is not None:
                        self.checkpoints.delivered(seq.request_id, have)
        finally:
            self.engine.abort(seq)
            self._forget([seq])

    def _forget(self, seqs: Sequence[EngineSequence]) -> None:
        """Their reader has all he wants of them."""
        if self.checkpoints is not None:
            for seq in seqs:
                self.checkpoints.forget(seq.request_id)
            self.checkpoints.save(wait=False)

    def _add_all(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
    ) -> list[list[EngineSequence]]:
        """Queues all or, when one is wrong, none; `n` sequences per prompt."""
        groups: list[list[EngineSequence]] = []
        try:
            for prompt_ids, one in zip(prompts, params, strict=True):
                groups.append([self.engine.add(prompt_ids, one)])
                groups[-1].extend(self._siblings(groups[-1][0]))
        except BaseException:
            self._abort([seq for group in groups for seq in group])
            raise
        return groups

    def _siblings(self, first: EngineSequence) -> list[EngineSequence]:
        """The other outputs of the same prompt: they share its KV and differ by their seed."""
        prompt_ids = first.tokens[: first.num_prompt_tokens]
        return [
            self.engine.add(
                prompt_ids,
                first.params.but(seed=(first.seed + i) % 2**64, prompt_logprobs=None),
                f"{first.request_id}-{i}",
                parent=first,
            )
            for i in range(1, first.params.n)
        ]

    def _finish(self, seqs: Sequence[EngineSequence]) -> None:
        try:
            while not all(seq.finished for seq in seqs):
                self.engine.step()
        finally:
            if self.checkpoints is not None:
                self.checkpoints.suspend(seq for seq in seqs if not seq.finished)
            self._abort(seqs)

    def _abort(self, seqs: Sequence[EngineSequence]) -> None:
        for seq in seqs:
            self.engine.abort(seq)

    def _encode(self, prompt: Prompt) -> list[int]:
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)

    def _make_tiers(self) -> KVTiers | None:
        labels = Labels(
            self.model.spec.name,
            self._draft_identity,
            check_compression(self.config.kv_compression),
        )
        return make_tiers(self.config, self.pool, labels)

    @property
    def _draft_identity(self) -> str:
        return self.draft_model.spec.kv_identity if self.draft_model else ""

    def _compare(self, tokenizer: Tokenizer) -> int | Bridge:
        """How many ids the draft model shares with the target, or how their tokens correspond."""
        assert self.draft_model is not None
        return shared_vocabulary(self.tokenizer, tokenizer) or Bridge.make(
            self.tokenizer,
            tokenizer,
            target_size=self.model.spec.vocab_size,
            draft_size=self.draft_model.spec.vocab_size,
        )

    def _make_pool(self) -> BlockPool:
        target = self.model.spec.kv
        draft = self.draft_model.spec.kv if self.draft_model else None
        together = isinstance(self.vocabulary, int)
        draft_bytes = draft.bytes_per_token if draft else 0
        block_bytes = self.config.block_size * (
            target.bytes_per_token + (draft_bytes if together else _more(draft_bytes))
        )
        wanted = -(-self.model.spec.max_model_len // self.config.block_size) + 8
        memory = self.config.kv_memory
        num_blocks = (
            min(wanted, available_bytes(target.device) // 4 // block_bytes)
            if memory is None
            else (memory - self.config.draft_memory) // block_bytes
        )
        if num_blocks < 2:
            raise ConfigError(
                f"kv_memory is {memory}: two blocks of KV take {2 * block_bytes} bytes"
            )
        return self._blocks(target, draft if together else None, num_blocks)

    def _blocks(self, target: KVSpec, draft: KVSpec | None, num_blocks: int) -> BlockPool:
        return BlockPool(
            target,
            draft,
            num_blocks=num_blocks,
            block_size=self.config.block_size,
            debug=self.config.debug_kv,
        )


def _more(count: int) -> int:
    """A smaller vocabulary needs more tokens for the same text."""
    return count * 5 // 4
