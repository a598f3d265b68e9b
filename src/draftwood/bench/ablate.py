"""Which part brings what: speed with a part exchanged or left out, against all parts and plain.

What is varied are parts of the way texts are made faster (who drafts, how large a tree may be,
whether the controller chooses its size) and workloads (temperature, requests at once, tokens before
the text). In a workload all settings and plain decoding take turns, group of prompts by group, each
with an engine that is new at the workload's beginning; the order rotates. A ratio is taken group by
group, so that a machine that slows down slows both sides of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

from draftwood.bench.fingerprint import Neighbours
from draftwood.bench.together import Together, run_together
from draftwood.engine.engine import Engine
from draftwood.errors import ConfigError
from draftwood.llm import LLM
from draftwood.sampling import SamplingParams

_WARM_UP_TOKENS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The parts that make a text faster.

    Attributes:
        drafter: its name; "none" is plain decoding.
        max_tree_nodes: most nodes of a tree.
        controller: it chooses the size of each tree; without it all that is proposed is verified.
    """

    drafter: str
    max_tree_nodes: int
    controller: bool


PLAIN = Setting(drafter="none", max_tree_nodes=0, controller=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is asked for.

    Attributes:
        temperature: 0 is greedy.
        batch: requests at once.
        context: tokens before the text at least; what a prompt lacks are other prompts in front.
    """

    temperature: float
    batch: int
    context: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Factors:
    """What is varied; the first value of each is that of the full setting.

    Attributes:
        drafters, trees, controllers: of `Setting`.
        temperatures, batches, contexts: of `Workload`.
    """

    drafters: Sequence[str]
    trees: Sequence[int]
    controllers: Sequence[bool]
    temperatures: Sequence[float]
    batches: Sequence[int]
    contexts: Sequence[int]

    @property
    def full(self) -> Setting:
        """All parts."""
        return Setting(
            drafter=self.drafters[0],
            max_tree_nodes=self.trees[0],
            controller=self.controllers[0],
        )

    @property
    def usual(self) -> Workload:
        """The workload in which all parts are varied."""
        return Workload(
            temperature=self.temperatures[0], batch=self.batches[0], context=self.contexts[0]
        )


@dataclass(frozen=True, slots=True)
class Block:
    """A workload and what takes turns at it; plain decoding is among it.

    Attributes:
        workload: what is asked for.
        settings: who answers.
    """

    workload: Workload
    settings: tuple[Setting, ...]


def one_at_a_time(factors: Factors) -> list[Block]:
    """Every part exchanged alone at the usual workload, and every workload changed alone.

    At the changed workloads the controller is left out as well: they are what it is for.
    """
    full, usual = factors.full, factors.usual
    without = [replace(full, controller=value) for value in factors.controllers[1:]]
    parts = [
        *(replace(full, drafter=value) for value in factors.drafters[1:]),
        *(replace(full, max_tree_nodes=value) for value in factors.trees[1:]),
        *without,
    ]
    workloads = [
        *(replace(usual, temperature=value) for value in factors.temperatures[1:]),
        *(replace(usual, batch=value) for value in factors.batches[1:]),
        *(replace(usual, context=value) for value in factors.contexts[1:]),
    ]
    blocks = [Block(usual, _settings(full, *parts))]
    return blocks + [Block(workload, _settings(full, *without)) for workload in workloads]


def grid(factors: Factors) -> list[Block]:
    """Every combination of everything."""
    settings = _settings(
        *(
            Setting(drafter=drafter, max_tree_nodes=tree, controller=controller)
            for drafter, tree, controller in itertools.product(
                factors.drafters, factors.trees, factors.controllers
            )
        )
    )
    return [
        Block(Workload(temperature=temperature, batch=batch, context=context), settings)
        for temperature, batch, context in itertools.product(
            factors.temperatures, factors.batches, factors.contexts
        )
    ]


def _settings(*settings: Setting) -> tuple[Setting, ...]:
    """Plain decoding first, and each once."""
    ours = (one for one in settings if one.drafter != PLAIN.drafter)
    return tuple(dict.fromkeys([PLAIN, *ours]))


@dataclass(frozen=True, slots=True, kw_only=True)
class AblationRun:
    """One `ablation` line: a group of prompts generated together.

    Attributes:
        setting, workload: which.
        group: number of the group of prompts.
        order: its turn, from 0.
        num_tokens: generated, over all requests.
        total_s: seconds from the first request to the last token.
        decode_s, decode_tokens: from where every request had its first token.
        num_rounds: rounds of all requests, each counted for itself.
        num_draft_tokens, num_accepted_tokens: nodes verified, and those that were right.
        num_identical: texts that are plain decoding's; None for plain decoding.
        neighbours: cores that other processes kept busy meanwhile; None where it is not known.
    """

    setting: Setting
    workload: Workload
    group: int
    order: int
    num_tokens: int
    total_s: float
    decode_s: float
    decode_tokens: int
    num_rounds: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_identical: int | None
    neighbours: float | None

    @property
    def tokens_per_s(self) -> float:
        """Over all requests, the prompts' computation included."""
        return self.num_tokens / self.total_s

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Over all requests, from where each had its first token; None when nothing came then."""
        return self.decode_tokens / self.decode_s if self.decode_tokens else None

    def to_json(self) -> dict[str, Any]:
        """The line's fields."""
        return {"type": "ablation", **asdict(self)}

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> AblationRun:
        """The run of an `ablation` line."""
        fields = {key: value for key, value in row.items() if key != "type"}
        fields["setting"] = Setting(**fields["setting"])
        fields["workload"] = Workload(**fields["workload"])
        return cls(**fields)


# A block and the number of a group: what is measured as a whole or not at all.
Cell = tuple[Workload, int]


def whole_cells(
    runs: Iterable[AblationRun], blocks: Sequence[Block]
) -> dict[Cell, list[AblationRun]]:
    """The runs of those cells in which every setting of their block ran.

    Runs of settings that the blocks do not have are kept in them: the record of a wider plan.
    """
    cells: dict[Cell, list[AblationRun]] = {}
    for run in runs:
        cells.setdefault((run.workload, run.group), []).append(run)
    wanted = {block.workload: set(block.settings) for block in blocks}
    return {
        cell: own
        for cell, own in cells.items()
        if wanted.get(cell[0], {PLAIN}) <= {run.setting for run in own}
    }


@dataclass(frozen=True, slots=True)
class Ablation:
    """What is run on what.

    Attributes:
        llm: the model.
        prompts: token ids; groups are cut from them, round and round.
        blocks: what to run.
        groups: of each block.
        params: for every prompt; temperature is the workload's.
    """

    llm: LLM
    prompts: Sequence[Sequence[int]]
    blocks: Sequence[Block]
    groups: int
    params: SamplingParams

    def check(self) -> None:
        """Refuses at the start what would fail in the middle.

        Raises:
            ConfigError: there are too few prompts that fit, or too few tokens to put before them.
        """
        for block in self.blocks:
            self._fitting(block.workload)

    def measure(
        self,
        done: Iterable[Cell],
        on_cell: Callable[[Sequence[AblationRun]], None],
        watch: Callable[[str, str], None] = lambda where, who: None,
    ) -> None:
        """Runs all cells that are not done.

        Args:
            done: cells to leave out.
            on_cell: told the runs of a cell when all of it is there.
            watch: told (workload and group, setting) before each run.
        """
        left_out = set(done)
        for block in self.blocks:
            groups = [n for n in range(self.groups) if (block.workload, n) not in left_out]
            if groups:
                prompts = self._fitting(block.workload)
                with self._engines(block) as engines:
                    for group in groups:
                        on_cell(self._cell(block, group, prompts, engines, watch))

    def _fitting(self, workload: Workload) -> list[list[int]]:
        """The prompts as the workload asks for them, without those that are too long."""
        room = self.llm.engine.max_length - (self.params.max_tokens or 1)
        filled = [_fill(self.prompts, i, workload.context) for i in range(len(self.prompts))]
        fit = [prompt for prompt in filled if len(prompt) <= room]
        if len(fit) < workload.batch:
            raise ConfigError(
                f"{len(fit)} prompts fit the context, and {workload.batch} are to run at once:"
                " give more, or ask for less"
            )
        return fit

    @contextmanager
    def _engines(self, block: Block) -> Iterator[dict[Setting, Engine]]:
        """A warm engine for each setting."""
        engines: dict[Setting, Engine] = {}
        try:
            for setting in block.settings:
                config = replace(
                    self.llm.config,
                    max_tree_nodes=setting.max_tree_nodes,
                    adaptive=setting.controller,
                )
                drafter = self.llm.make_drafter(setting.drafter)
                engines[setting] = self.llm.make_engine(drafter, config)
                warm_up = self.params.but(max_tokens=_WARM_UP_TOKENS)
                run_together(engines[setting], [self.prompts[0][:16]], warm_up)
            yield engines
        finally:
            for engine in engines.values():
                engine.close()

    def _cell(
        self,
        block: Block,
        group: int,
        prompts: Sequence[Sequence[int]],
        engines: dict[Setting, Engine],
        watch: Callable[[str, str], None],
    ) -> list[AblationRun]:
        workload, settings = block.workload, block.settings
        start = group * workload.batch
        chosen = [prompts[(start + i) % len(prompts)] for i in range(workload.batch)]
        params = self.params.but(temperature=workload.temperature)
        first = group % len(settings)
        results: dict[Setting, tuple[Together, float | None]] = {}
        for setting in (*settings[first:], *settings[:first]):
            watch(f"{workload_name(workload)}, {group + 1}", setting_name(setting))
            others = Neighbours()
            result = run_together(engines[setting], chosen, params)
            results[setting] = (result, others.cores())
        plain = results[PLAIN][0].texts
        return [
            _run(setting, workload, group, order, result, plain, neighbours)
            for order, (setting, (result, neighbours)) in enumerate(results.items())
        ]


def _run(
    setting: Setting,
    workload: Workload,
    group: int,
    order: int,
    result: Together,
    plain: Sequence[Sequence[int]],
    neighbours: float | None,
) -> AblationRun:
    same = sum(a == b for a, b in zip(result.texts, plain, strict=True))
    return AblationRun(
        setting=setting,
        workload=workload,
        group=group,
        order=order,
        num_tokens=sum(map(len, result.texts)),
        total_s=result.total_s,
        decode_s=result.decode_s,
        decode_tokens=result.decode_tokens,
        num_rounds=result.num_rounds,
        num_draft_tokens=result.num_draft_tokens,
        num_accepted_tokens=result.num_accepted_tokens,
        num_identical=None if setting == PLAIN else same,
        neighbours=neighbours,
    )


def _fill(prompts: Sequence[Sequence[int]], index: int, context: int) -> list[int]:
    """A prompt behind the ends of those that follow it, so that all together has that length."""
    own = list(prompts[index])
    others = (prompts[(index + i) % len(prompts)] for i in range(1, len(prompts)))
    before: list[int] = []
    while len(before) + len(own) < context:
        other = next(others, None)
        if other is None:
            raise ConfigError(
                f"the prompts have {len(before) + len(own)} tokens together, and {context} are to"
                " stand before a text: give more prompts, or ask for less"
            )
        before = [*other, *before]
    return before[max(len(before) + len(own) - context, 0) :] + own


def setting_name(setting: Setting) -> str:
    """For people."""
    if setting == PLAIN:
        return "plain"
    controller = "" if setting.controller else ", no controller"
    return f"{setting.drafter}, {setting.max_tree_nodes} nodes{controller}"


def workload_name(workload: Workload) -> str:
    """For people."""
    sampled = f"temperature {workload.temperature:g}" if workload.temperature else "greedy"
    context = f", {workload.context} tokens before" if workload.context else ""
    return f"{sampled}, {workload.batch} at once{context}"
