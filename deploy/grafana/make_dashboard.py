"""Writes draftwood.json, the Grafana dashboard beside this file.

    python deploy/grafana/make_dashboard.py

The panels are the table at the end; all else is layout. tests/serve/test_deploy.py asks a real
Prometheus every expression and compares the file with what this gives.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

WIDTH = 24
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
LABELS = 'model_name=~"$model_name", instance=~"$instance"'

Json = dict[str, Any]


def one(metric: str, more: str = "") -> str:
    """A series of the chosen models and servers."""
    return f"{metric}{{{LABELS}{more}}}"


def rate(metric: str, by: str = "", more: str = "") -> str:
    """What a counter gains in a second, summed up."""
    over = f" by ({by})" if by else ""
    return f"sum{over}(rate({one(metric, more)}[$__rate_interval]))"


def quantile(q: float, histogram: str) -> str:
    """A quantile of a histogram over the last minutes."""
    return f"histogram_quantile({q}, {rate(histogram + '_bucket', 'le')})"


def mean(histogram: str) -> str:
    """The mean of a histogram over the last minutes."""
    return f"{rate(histogram + '_sum')} / {rate(histogram + '_count')}"


def quantiles(histogram: str) -> list[tuple[str, str]]:
    """Median, 95th and 99th percentile."""
    return [(quantile(q, histogram), f"p{q * 100:.0f}") for q in (0.5, 0.95, 0.99)]


SPEC = "vllm:spec_decode_num"
ACCEPTED, DRAFTED = rate(f"{SPEC}_accepted_tokens_total"), rate(f"{SPEC}_draft_tokens_total")
DRAFTS = rate(f"{SPEC}_drafts_total")
TOKENS = rate("vllm:generation_tokens_total")
PER_ROUND = f"{TOKENS} / {rate('draftwood:request_rounds_total')}"
PHASES = rate("draftwood:phase_seconds_total", "phase")
ALL_PHASES = rate("draftwood:phase_seconds_total")
TROUBLES = ["dropped", "corrupt", "late", "failures"]
TIER = "draftwood:cache_tier"

# A row: its title and its panels. A panel: kind, title, unit, what it means, (expression, legend).
ROWS: list[tuple[str, list[tuple[str, str, str, str, list[tuple[str, str]]]]]] = [
    (
        "Now",
        [
            ("stat", "Tokens/s", "short", "Tokens generated in a second.", [(TOKENS, "")]),
            ("stat", "Tokens a round", "short", "1 is plain decoding.", [(PER_ROUND, "")]),
            (
                "stat",
                "Accepted",
                "percentunit",
                "Share of verified draft tokens that were right.",
                [(f"{ACCEPTED} / {DRAFTED}", "")],
            ),
            (
                "stat",
                "Running",
                "short",
                "Requests in the batch.",
                [(f"sum({one('vllm:num_requests_running')})", "")],
            ),
            (
                "stat",
                "Waiting",
                "short",
                "Requests that wait for a place.",
                [(f"sum({one('vllm:num_requests_waiting')})", "")],
            ),
            (
                "stat",
                "KV in use",
                "percentunit",
                "Share of KV blocks that requests hold, on the fullest server.",
                [(f"max({one('vllm:kv_cache_usage_perc')})", "")],
            ),
        ],
    ),
    (
        "Speculation",
        [
            (
                "timeseries",
                "Tokens a round and a tree",
                "short",
                "A round: all rounds of requests, plain ones included. A tree: rounds with a draft,"
                " which is vLLM's mean acceptance length.",
                [(PER_ROUND, "a round"), (f"1 + {ACCEPTED} / {DRAFTS}", "a tree")],
            ),
            (
                "timeseries",
                "Accepted, by who proposed",
                "percentunit",
                "Share of each drafter's verified tokens that were right.",
                [
                    (
                        f"{rate('draftwood:accepted_tokens_total', 'source')}"
                        f" / {rate('draftwood:draft_tokens_total', 'source')}",
                        "{{source}}",
                    ),
                    (f"{ACCEPTED} / {DRAFTED}", "all"),
                ],
            ),
            (
                "timeseries",
                "Accepted, by position",
                "percentunit",
                "Share of trees whose accepted path reached a depth; 0 is the first draft token.",
                [
                    (
                        f"{rate(f'{SPEC}_accepted_tokens_per_pos_total', 'position')}"
                        f" / on() group_left() {DRAFTS}",
                        "{{position}}",
                    )
                ],
            ),
            (
                "heatmap",
                "Tree sizes chosen",
                "short",
                "Draft tokens verified for a request in a round; 0 is plain decoding.",
                [
                    (
                        f"sum by (le)(increase({one('draftwood:tree_nodes_bucket')}"
                        "[$__rate_interval]))",
                        "{{le}}",
                    )
                ],
            ),
            (
                "timeseries",
                "Trust",
                "short",
                "Accepted draft tokens over promised ones, as the controller sees it; 1 is as"
                " promised.",
                [(one("draftwood:trust"), "{{instance}}")],
            ),
            (
                "timeseries",
                "Draft tokens/s",
                "short",
                "Verified, and right.",
                [(DRAFTED, "verified"), (ACCEPTED, "right")],
            ),
        ],
    ),
    (
        "Where time goes",
        [
            (
                "stacked",
                "Share of a round",
                "percentunit",
                "Proposing and learning, the target's forward, walking trees, committing.",
                [(f"{PHASES} / on() group_left() {ALL_PHASES}", "{{phase}}")],
            ),
            (
                "timeseries",
                "Seconds a round",
                "s",
                "The same in seconds.",
                [
                    (
                        f"{PHASES} / on() group_left() {rate('draftwood:rounds_total')}",
                        "{{phase}}",
                    )
                ],
            ),
            (
                "timeseries",
                "Rows a forward",
                "short",
                "Tokens that the target computes in one forward: roots, draft tokens, prompts.",
                [(f"{rate('draftwood:rows_total')} / {rate('draftwood:rounds_total')}", "rows")],
            ),
        ],
    ),
    (
        "Latency",
        [
            (
                "timeseries",
                "Time to first token",
                "s",
                "From arrival.",
                quantiles("vllm:time_to_first_token_seconds"),
            ),
            (
                "timeseries",
                "Time between tokens",
                "s",
                "Between the rounds in which a request got tokens.",
                quantiles("vllm:inter_token_latency_seconds"),
            ),
            (
                "timeseries",
                "Time a token",
                "s",
                "After the first, averaged over each request.",
                quantiles("vllm:request_time_per_output_token_seconds"),
            ),
            (
                "timeseries",
                "Whole request",
                "s",
                "From arrival to end.",
                quantiles("vllm:e2e_request_latency_seconds"),
            ),
            (
                "timeseries",
                "Parts of a request",
                "s",
                "Means: waiting, computing the prompt, decoding.",
                [
                    (mean("vllm:request_queue_time_seconds"), "queue"),
                    (mean("vllm:request_prefill_time_seconds"), "prefill"),
                    (mean("vllm:request_decode_time_seconds"), "decode"),
                ],
            ),
            (
                "timeseries",
                "Tokens of a request",
                "short",
                "Means.",
                [
                    (mean("vllm:request_prompt_tokens"), "prompt"),
                    (mean("vllm:request_generation_tokens"), "generated"),
                ],
            ),
        ],
    ),
    (
        "Load",
        [
            (
                "timeseries",
                "Requests",
                "short",
                "In the batch, and waiting for a place.",
                [
                    (f"sum({one('vllm:num_requests_running')})", "running"),
                    (f"sum({one('vllm:num_requests_waiting')})", "waiting"),
                ],
            ),
            (
                "timeseries",
                "Requests ended",
                "reqps",
                "By why they ended.",
                [
                    (
                        rate("vllm:request_success_total", "finished_reason"),
                        "{{finished_reason}}",
                    )
                ],
            ),
            (
                "timeseries",
                "Tokens/s",
                "short",
                "Prompt tokens, cached ones included, and tokens generated.",
                [(rate("vllm:prompt_tokens_total"), "prompt"), (TOKENS, "generated")],
            ),
            (
                "timeseries",
                "Preemptions and failures",
                "short",
                "A second: requests put back for want of memory, and calls of a drafter that"
                " failed.",
                [
                    (rate("vllm:num_preemptions_total"), "preempted"),
                    (rate("draftwood:drafter_failures_total"), "drafter failed"),
                ],
            ),
        ],
    ),
    (
        "KV and its tiers",
        [
            (
                "stacked",
                "KV blocks",
                "short",
                "Held by requests, kept for reuse, free.",
                [(f"sum by (state)({one('draftwood:kv_blocks')})", "{{state}}")],
            ),
            (
                "timeseries",
                "Prompts that were cached",
                "percentunit",
                "Share of prompt tokens, by the tier that had them.",
                [
                    (
                        f"{rate('draftwood:cached_tokens_total', 'tier')}"
                        f" / on() group_left() {rate('vllm:prompt_tokens_total')}",
                        "{{tier}}",
                    )
                ],
            ),
            (
                "timeseries",
                "Blocks of disk and Redis",
                "short",
                "A second: restored, asked for and not had, written.",
                [
                    (rate(f"{TIER}_{what}_total", "tier"), f"{{{{tier}}}} {what}")
                    for what in ("hits", "misses", "stored")
                ],
            ),
            (
                "timeseries",
                "Bytes of disk and Redis",
                "Bps",
                "Read and written.",
                [
                    (rate(f"{TIER}_{what}_bytes_total", "tier"), f"{{{{tier}}}} {what}")
                    for what in ("read", "written")
                ],
            ),
            (
                "timeseries",
                "Troubles of disk and Redis",
                "short",
                "A second: not written, damaged, late, failed.",
                [
                    (rate(f"{TIER}_{what}_total", "tier"), f"{{{{tier}}}} {what}")
                    for what in TROUBLES
                ],
            ),
        ],
    ),
]


def defaults(kind: str, unit: str) -> Json:
    """How a panel draws its fields."""
    if kind == "stat":
        steps = [{"color": "text", "value": None}]
        return {"unit": unit, "thresholds": {"mode": "absolute", "steps": steps}}
    if kind == "heatmap":
        return {}
    stacking = {"group": "A", "mode": "normal" if kind == "stacked" else "none"}
    custom = {
        "drawStyle": "line",
        "lineWidth": 1,
        "fillOpacity": 40 if kind == "stacked" else 0,
        "showPoints": "never",
        "stacking": stacking,
    }
    return {"unit": unit, "min": 0, "color": {"mode": "palette-classic"}, "custom": custom}


def options(kind: str) -> Json:
    """A panel's other settings."""
    if kind == "stat":
        reduce = {"calcs": ["lastNotNull"], "fields": "", "values": False}
        return {"reduceOptions": reduce, "colorMode": "none", "graphMode": "area"}
    if kind == "heatmap":
        color = {"mode": "scheme", "scheme": "Blues", "steps": 32}
        return {"calculate": False, "color": color, "yAxis": {"unit": "short"}}
    legend = {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []}
    return {"legend": legend, "tooltip": {"mode": "multi", "sort": "desc"}}


def target(number: int, kind: str, expression: str, legend: str) -> Json:
    """A query."""
    return {
        "refId": "ABCDEFGH"[number],
        "datasource": SOURCE,
        "expr": expression,
        "legendFormat": legend or "__auto",
        **({"format": "heatmap"} if kind == "heatmap" else {}),
    }


def panels() -> list[Json]:
    """All panels with their places: stats in one line, graphs three a line."""
    made: list[Json] = []
    y = 0
    for title, row in ROWS:
        place = {"h": 1, "w": WIDTH, "x": 0, "y": y}
        made.append({"type": "row", "title": title, "collapsed": False, "gridPos": place})
        made[-1]["panels"] = []
        y += 1
        small = row[0][0] == "stat"
        columns, height = (6, 4) if small else (3, 8)
        for i, (kind, name, unit, text, targets) in enumerate(row):
            width = WIDTH // columns
            x, line = i % columns, i // columns
            made.append(
                {
                    "type": "timeseries" if kind == "stacked" else kind,
                    "title": name,
                    "description": text,
                    "datasource": SOURCE,
                    "gridPos": {"h": height, "w": width, "x": x * width, "y": y + line * height},
                    "fieldConfig": {"defaults": defaults(kind, unit), "overrides": []},
                    "options": options(kind),
                    "targets": [target(n, kind, *t) for n, t in enumerate(targets)],
                }
            )
        y += height * -(-len(row) // columns)
    return [{"id": number, **panel} for number, panel in enumerate(made, start=1)]


def variable(name: str, label: str) -> Json:
    """A choice of values that a label has."""
    query = f"label_values(vllm:num_requests_running, {name})"
    return {
        "type": "query",
        "name": name,
        "label": label,
        "datasource": SOURCE,
        "query": {"query": query, "refId": name},
        "definition": query,
        "refresh": 2,
        "sort": 1,
        "includeAll": True,
        "allValue": ".*",
        "multi": True,
        "current": {"text": ["All"], "value": ["$__all"]},
    }


def dashboard() -> Json:
    """The whole."""
    source = {"type": "datasource", "name": "datasource", "label": "Prometheus"}
    return {
        "uid": "draftwood",
        "title": "Draftwood",
        "description": "Speculative decoding: speed, acceptance, latency, load, KV.",
        "tags": ["draftwood", "vllm"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "browser",
        "templating": {
            "list": [
                {**source, "query": "prometheus", "refresh": 1},
                variable("model_name", "Model"),
                variable("instance", "Server"),
            ]
        },
        "annotations": {"list": []},
        "links": [],
        "panels": panels(),
    }


def text() -> str:
    """The file's contents."""
    return json.dumps(dashboard(), indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    Path(__file__).with_name("draftwood.json").write_text(text(), encoding="utf-8")
