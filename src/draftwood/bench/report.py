"""One page from many records: self-contained, for the screen and for print."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from pathlib import Path

from draftwood.bench.contenders import PLAIN
from draftwood.bench.intervals import Estimate, interval_text
from draftwood.bench.picture import Plot
from draftwood.bench.record_file import RecordFile, Row
from draftwood.bench.report_plots import plots
from draftwood.bench.spec import GROUPS, summarise_spec
from draftwood.bench.speedups import ALL, speedups
from draftwood.bench.summary import summarise
from draftwood.errors import ConfigError

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #111; background: #fff;
       max-width: 52rem; margin: 2rem auto; padding: 0 1rem; }
h1, h2 { line-height: 1.2; } h2 { margin-top: 3rem; border-bottom: 1px solid #999; }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums; }
.wide { overflow-x: auto; }
th, td { padding: .25rem .6rem; border-bottom: 1px solid #bbb; text-align: right; }
th:first-child, td:first-child { text-align: left; } td { white-space: nowrap; }
.many { font-size: .8rem; } .many th, .many td { padding: .25rem .35rem; }
figure { margin: 1.5rem 0; } img { max-width: 100%; height: auto; }
figcaption, .facts { font-size: .9rem; color: #333; }
code { font-size: .95em; }
@media print { body { max-width: none; margin: 0; font-size: 10pt; }
  figure, tr { break-inside: avoid; } h2 { break-after: avoid; } .wide { overflow: visible; } }
"""

_SPEEDS = ("", "tokens/s", "decoding", "x plain, median (95 %)", "worst", "tokens a round", "same")


def make_report(records: Sequence[RecordFile], out: Path, plot_folder: Path | None = None) -> None:
    """Writes the page and, if a folder is given, its pictures as PNG files.

    Args:
        records: a section each, in this order.
        out: the page.
        plot_folder: where pictures go, named after the record and what they show.

    Raises:
        ConfigError: a file cannot be written.
        MissingExtraError: matplotlib is not installed.
    """
    drawn = [(record, list(plots(record))) for record in records]
    sections = "\n".join(_section(record, pictures) for record, pictures in drawn)
    _write(out, _page(sections).encode())
    if plot_folder is not None:
        for record, pictures in drawn:
            for picture in pictures:
                stem = record.name.removesuffix(".jsonl")
                _write(plot_folder / f"{stem}-{picture.name}.png", picture.png())


def _write(path: Path, content: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error


def _page(sections: str) -> str:
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Draftwood: measurements</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>Draftwood: measurements</h1>
<p>Made by <code>draftwood bench report</code> from the records named below; every number is
recomputed from their lines. Trust ratios more than single figures, and numbers from one machine for
that machine.</p>
{sections}
</body>
</html>
"""


def _section(record: RecordFile, pictures: Iterable[Plot]) -> str:
    facts, name = escape(_facts(record)), escape(record.name)
    parts = [
        f"<h2>{escape(record.command)}: {escape(record.model)}</h2>",
        f'<p class="facts">{facts}<br>Record: <code>{name}</code></p>',
        *_tables(record),
        *(_figure(picture) for picture in pictures),
    ]
    return "\n".join(parts)


def _facts(record: RecordFile) -> str:
    """Machine, versions, settings: one line."""
    machine = record.machine
    cpu = machine["cpu"]
    params = record.fingerprint.get("params") or {}
    temperature = params.get("temperature", 0.0)
    facts = [
        machine["gpu"] or f"{cpu['model']}, {cpu['num_threads']} of {cpu['num_cores']} cores",
        f"torch {machine['torch']}",
        f"draftwood {machine['draftwood']}" + _at(machine.get("commit")),
        str(machine["date"])[:10],
    ]
    if params:
        facts.append(f"{params['max_tokens']} tokens at most")
        facts.append(f"temperature {temperature:g}" if temperature else "greedy")
    prompts = record.fingerprint.get("prompts")
    if prompts:
        facts.append(f"{prompts['count']} prompts: {prompts['source']}")
    return "; ".join(facts)


def _at(commit: str | None) -> str:
    return f" at {commit}" if commit else ""


def _figure(picture: Plot) -> str:
    data = base64.b64encode(picture.svg()).decode()
    caption = escape(picture.caption)
    return (
        f'<figure><img alt="{caption}" src="data:image/svg+xml;base64,{data}">'
        f"<figcaption>{caption}</figcaption></figure>"
    )


def _tables(record: RecordFile) -> Iterator[str]:
    if record.command == "spec" and record.runs:
        yield _table(*_leaderboard(record))
    elif record.runs:
        yield _table(*_speeds(record))
    for kind, fields in _FIELDS.items():
        rows = [{**row, **row.get("metrics", {}), **_switch(row)} for row in record.of(kind)]
        if rows:
            yield _table(
                list(fields.values()), [[_cell(row.get(f)) for f in fields] for row in rows]
            )


def _switch(row: Row) -> Row:
    """Whether a server speculated, in words."""
    names = {True: "on", False: "off"}
    return {"speculation": names.get(row["speculation"])} if row["type"] == "load" else {}


# Line type to its fields and their titles, for lines that are shown as they are.
_FIELDS = {
    "batch_summary": {
        "concurrency": "at once",
        "plain_tokens_per_s": "plain tokens/s",
        "tokens_per_s": "tokens/s",
        "ratio": "x plain",
        "decode_ratio": "decoding",
        "worst": "worst",
    },
    "mlperf": {
        "contender": "LoadGen",
        "scenario": "scenario",
        "mode": "mode",
        "valid": "valid",
        "tokens_per_s": "tokens/s",
        "ttft_p99_s": "TTFT p99, s",
        "tpot_p99_s": "TPOT p99, s",
        "rouge1": "ROUGE-1",
        "rougeL": "ROUGE-L",
    },
    "kv": {
        "tier": "from",
        "num_cached_tokens": "cached",
        "ttft_s": "seconds",
        "speedup": "x cold",
        "floor_s": "floor",
    },
    "scale": {
        "policy": "policy",
        "hit_rate": "cached",
        "possible_hit_rate": "possible",
        "balance": "busiest over mean",
        "ttft_p50_s": "first token p50, s",
        "ttft_p99_s": "p99",
        "latency_p50_s": "answer p50, s",
        "latency_p99_s": "p99",
        "decision_us": "decision, us",
    },
    "load": {
        "concurrency": "clients",
        "speculation": "speculation",
        "tokens_per_s": "tokens/s",
        "ttft_p50_s": "first text, s",
        "ttft_p99_s": "p99",
        "tpot_p50_s": "token, s",
        "tpot_p99_s": "p99",
    },
    "load_ratio": {
        "concurrency": "clients",
        "ratio": "x without speculation",
        "worst": "worst pair",
        "num_pairs": "pairs",
    },
    "ablation_summary": {
        "part": "changed",
        "decode_tokens_per_s": "tokens/s",
        "to_plain": "x plain, median (95 %)",
        "to_full": "x all parts, median (95 %)",
        "tokens_per_round": "tokens a round",
        "nodes_per_round": "nodes a round",
        "num_identical": "same texts",
        "num_texts": "of",
    },
    "beams_summary": {
        "num_beams": "beams",
        "tokens_per_s": "tokens/s",
        "transformers_tokens_per_s": "transformers'",
        "ratio": "x transformers, median (95 %)",
        "worst": "worst",
        "num_identical": "same texts",
        "num_prompts": "of",
    },
    "grammar_summary": {
        "drafter": "",
        "free_ms": "free text, ms a token",
        "grammar_ms": "with a grammar",
        "per_token": "ratio, median (95 %)",
        "per_round": "of a round (95 %)",
        "num_in_form": "in form",
        "num_prompts": "of",
    },
    "quality": {
        "text": "text",
        "reference_perplexity": "float32",
        "perplexity": "tested",
        "perplexity_change": "change",
        "divergence": "KL, nats",
        "same_choice": "same choice",
    },
}


def _speeds(record: RecordFile) -> tuple[Sequence[str], list[list[str]]]:
    found = speedups(record)
    rows = []
    for name, one in summarise(record.runs).items():
        ratios, rounds, texts = one["to_plain"]["decode"], one["rounds"], one["texts"]
        row = [
            name,
            _number(one["tokens_per_s"], 1),
            _number(one["decode_tokens_per_s"], 1),
            _speedup(found.get(name, {}).get(ALL)) if name != PLAIN else "1",
            _number(ratios["min"] if ratios else None, 2),
            _number(rounds["mean_acceptance_length"] if rounds else None, 2),
            f"{texts['num_identical']} of {texts['num_compared']}" if texts["num_compared"] else "",
        ]
        rows.append(row)
    return _SPEEDS, rows


def _leaderboard(record: RecordFile) -> tuple[Sequence[str], list[list[str]]]:
    columns = ["", *GROUPS.values(), "#Mean Accepted Tokens", "Overall", "same text"]
    rows = []
    for name, one in summarise_spec(record.runs).items():
        speedup, accepted = one["speedup"], one["mean_accepted_tokens"]["overall"]
        times = [_number(speedup.get(group), 2) for group in (*GROUPS, "overall")]
        times = [f"{value}x" if value else "" for value in times]
        same = f"{one['num_identical']} of {one['num_compared']}"
        rows.append([name, *times[:-1], _number(accepted, 2), times[-1], same])
    return columns, rows


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in columns)
    body = "\n".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    many = ' class="many"' if len(columns) > 7 else ""
    return (
        f'<div class="wide"><table{many}><thead><tr>{head}</tr></thead>\n'
        f"<tbody>{body}</tbody></table></div>"
    )


def _speedup(one: Estimate | None) -> str:
    return "" if one is None else interval_text(one)


def _cell(value: object) -> str:
    if isinstance(value, dict):
        return interval_text(Estimate(**value))
    if isinstance(value, float):
        return re.sub(r"\.0+$", "", f"{value:.4g}")
    return "" if value is None else str(value)


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"
