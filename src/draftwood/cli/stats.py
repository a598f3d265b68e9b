"""How a request went, for people and for machines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from draftwood.cache import human_bytes

if TYPE_CHECKING:
    from draftwood.engine.observers import RoundTimer
    from draftwood.kv.tiers import TierCounters
    from draftwood.llm import LLM
    from draftwood.outputs import RequestOutput


_SHOWN_ROWS = (1, 4, 16, 64)


def tokens_per_s(output: RequestOutput) -> float:
    """Speed of decoding: the first token, which the prompt's forward gives, is not counted."""
    num_tokens, seconds = _num_timed(output) - 1, output.metrics.decode_s
    return num_tokens / seconds if num_tokens > 0 and seconds > 0 else 0.0


def _num_timed(output: RequestOutput) -> int:
    """Tokens that were generated in this process."""
    return len(output.token_ids) - output.metrics.num_resumed_tokens


def output_record(output: RequestOutput, name: str | None = None) -> dict[str, Any]:
    """A request's output as JSON."""
    metrics = output.metrics
    first = metrics.first_token_s
    return {
        "id": name or output.request_id,
        "text": output.text,
        "token_ids": list(output.token_ids),
        "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason,
        "seed": output.seed,
        "num_prompt_tokens": len(output.prompt_token_ids),
        "num_cached_tokens": metrics.num_cached_tokens,
        "cached_by_tier": dict(metrics.cached_by_tier),
        "num_tokens": len(output.token_ids),
        "num_resumed_tokens": metrics.num_resumed_tokens,
        "num_rounds": metrics.num_rounds,
        "num_draft_tokens": metrics.num_draft_tokens,
        "num_accepted_tokens": metrics.num_accepted_tokens,
        "num_forced_tokens": metrics.num_forced_tokens,
        "mean_acceptance_length": metrics.mean_acceptance_length,
        "acceptance_rate": metrics.acceptance_rate,
        "accepted_per_position": list(metrics.accepted_per_position),
        "ttft_s": None if first is None else first - metrics.arrival_s,
        "decode_s": metrics.decode_s,
        "tokens_per_s": tokens_per_s(output),
        **({} if output.score is None else {"score": output.score}),
    } | ({} if output.logprobs is None else {"logprobs": [asdict(one) for one in output.logprobs]})


def model_record(llm: LLM, load_s: float) -> dict[str, Any]:
    """What answered, as JSON."""
    from draftwood.models.known_quality import quality_of

    spec = llm.model.spec
    return {
        "model": spec.name,
        "draft": llm.draft_model.spec.name if llm.draft_model else None,
        "drafter": llm.engine.drafter.name,
        "device": str(spec.device),
        "dtype": str(spec.dtype).removeprefix("torch."),
        "quantization": spec.quantization,
        "quality": None if (quality := quality_of(spec)) is None else asdict(quality),
        "load_s": load_s,
    }


def engine_record(llm: LLM, timer: RoundTimer) -> dict[str, Any]:
    """Where the time of the rounds went, and what the controller did, as JSON."""
    return {
        "time_shares": timer.shares(),
        "controller": llm.engine.controller.view(),
        "draft_cost": _draft_cost(llm),
        "kv_tiers": {name: asdict(one) for name, one in _tiers(llm).items()},
    }


def stats_lines(outputs: Sequence[RequestOutput], llm: LLM, timer: RoundTimer) -> list[str]:
    """What `--stats` prints."""
    lines = [*_speed(outputs), _acceptance(outputs)]
    if positions := _positions(outputs):
        lines.append(f"accepted by position: {positions}")
    controller = llm.engine.controller
    if sizes := controller.sizes:
        chosen = ", ".join(f"{size} ({count}x)" for size, count in _most(sizes, 6))
        lines.append(f"draft tokens a round: {chosen}")
    if controller.num_drafted_rounds:
        rounds = controller.num_drafted_rounds
        lines.append(
            f"draft tokens accepted a round: {controller.num_accepted / rounds:.2f},"
            f" expected {controller.num_expected / rounds:.2f}"
        )
    if shares := timer.shares():
        parts = ", ".join(f"{name} {100 * share:.1f} %" for name, share in shares.items())
        lines.append(f"time: {parts}")
    lines += _costs(llm)
    lines += _quality(llm)
    lines.extend(_tier_line(name, counters) for name, counters in _tiers(llm).items())
    return lines


def _costs(llm: LLM) -> list[str]:
    """What forwards take, as measured at the start and corrected since."""
    known = {"target": llm.engine.controller.cost, "draft": llm.draft_cost}
    parts = [
        f"{name} {', '.join(f'{1000 * cost.at(0)(rows):.1f}' for rows in _SHOWN_ROWS)} ms"
        for name, cost in known.items()
        if cost is not None
    ]
    rows = ", ".join(map(str, _SHOWN_ROWS))
    return [f"forward of {rows} rows: {'; '.join(parts)}"] if parts else []


def _draft_cost(llm: LLM) -> dict[str, Any] | None:
    """The draft model's cost table and how far the machine is from it now, as JSON."""
    cost = llm.draft_cost
    if cost is None:
        return None
    return {
        "rows": list(cost.near.rows),
        "seconds": list(cost.near.seconds),
        "far_context": cost.far_context,
        "far_seconds": list(cost.far.seconds),
        "pace": cost.pace,
    }


def _quality(llm: LLM) -> list[str]:
    from draftwood.models.known_quality import quality_of

    spec = llm.model.spec
    if spec.quantization == "none":
        return []
    known = quality_of(spec)
    if known is None:
        return [f"quality of {spec.quantization}: unknown; draftwood bench quality measures it"]
    return [
        f"quality of {spec.quantization}: {known.divergence:.4f} nats from float32 (mean KL),"
        f" perplexity {100 * known.perplexity_change:+.1f} %"
    ]


def _tiers(llm: LLM) -> dict[str, TierCounters]:
    """What each tier did; what is still on its way there is waited for, so that it counts."""
    if llm.tiers is None:
        return {}
    llm.tiers.flush()
    return llm.tiers.counters


def _tier_line(name: str, counters: TierCounters) -> str:
    """Blocks read and written at one tier, and what went wrong there, if anything did."""
    troubles = {
        "dropped": counters.num_dropped,
        "damaged": counters.num_corrupt,
        "late": counters.num_late,
        "failed calls": counters.num_failures,
    }
    return f"KV on {name}: " + ", ".join(
        [
            f"{counters.num_hits} blocks restored ({human_bytes(counters.bytes_read)})",
            f"{counters.num_stored} written ({human_bytes(counters.bytes_written)})",
            *(f"{count} {what}" for what, count in troubles.items() if count),
        ]
    )


def _speed(outputs: Sequence[RequestOutput]) -> list[str]:
    return [
        f"{output.request_id}: prompt {len(output.prompt_token_ids)} tokens"
        f" ({_cached(output)}), {_first(output)},"
        f" then {len(output.token_ids)} tokens at {tokens_per_s(output):.1f} tokens/s"
        f" ({output.finish_reason})"
        for output in outputs
    ]


def _cached(output: RequestOutput) -> str:
    """How many prompt tokens were cached, and where, when some were not in RAM."""
    metrics = output.metrics
    parts = [f"{count} from {tier}" for tier, count in metrics.cached_by_tier.items() if count]
    where = "" if set(metrics.cached_by_tier) <= {"ram"} else f": {', '.join(parts) or 'none'}"
    return f"{metrics.num_cached_tokens} cached{where}"


def _first(output: RequestOutput) -> str:
    first = output.metrics.first_token_s
    return "no token" if first is None else f"first after {first - output.metrics.arrival_s:.2f} s"


def _acceptance(outputs: Sequence[RequestOutput]) -> str:
    rounds = sum(o.metrics.num_rounds for o in outputs)
    drafted = sum(o.metrics.num_draft_tokens for o in outputs)
    accepted = sum(o.metrics.num_accepted_tokens for o in outputs)
    length = 1 + accepted / rounds if rounds else 1.0
    rate = f"{100 * accepted / drafted:.0f} %" if drafted else "none drafted"
    return (
        f"mean acceptance length: {length:.2f} tokens a round over {rounds} rounds;"
        f" draft tokens accepted: {accepted} of {drafted} ({rate})"
    )


def _positions(outputs: Sequence[RequestOutput]) -> str:
    rounds = sum(o.metrics.num_rounds for o in outputs)
    counts: list[int] = []
    for output in outputs:
        for depth, count in enumerate(output.metrics.accepted_per_position):
            counts[depth : depth + 1] = [(counts[depth] if depth < len(counts) else 0) + count]
    return ", ".join(f"{depth}: {100 * c / rounds:.0f} %" for depth, c in enumerate(counts[:8], 1))


def _most(sizes: dict[int, int], count: int) -> list[tuple[int, int]]:
    most = sorted(sizes.items(), key=lambda item: -item[1])[:count]
    return sorted(most)
