"""`bench report`: what of a record is drawn, and a page that needs nothing else."""

from __future__ import annotations

import base64
import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from draftwood.bench.intervals import estimate, mean, middle, ratio_of_means
from draftwood.bench.record_file import load_record
from draftwood.bench.report import make_report
from draftwood.bench.report_plots import plots
from draftwood.bench.speedups import ALL, speedups
from draftwood.cli.app import run as run_command
from draftwood.errors import ConfigError, MissingExtraError
from tests.bench.test_summary import record as run_of
from tests.bench.test_summary import rounds

ENVIRONMENT = {
    "date": "2026-01-02T03:04:05+00:00",
    "cpu": {"model": "A <CPU> & co", "num_cores": 2, "num_threads": 2},
    "gpu": None,
    "torch": "2",
    "draftwood": "0",
}
PNG = b"\x89PNG\r\n\x1a\n"


def fingerprint(command: str, **facts: Any) -> dict[str, Any]:
    """A first line."""
    model = {"name": "tiny", "dtype": "float32", "quantization": "none"}
    head = {"type": "fingerprint", "command": command, "model": model, "draft_model": None}
    return {**head, "environment": ENVIRONMENT, **facts}


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    """A record."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def runs(times: float = 2.0) -> list[dict[str, Any]]:
    """Four prompts of two kinds, plain and a drafter `times` as fast as it."""
    made = []
    for i, prompt in enumerate(("a1", "a2", "b1", "b2")):
        own = rounds(5 + i, (12, 12, 3), (9, 6, 1))
        made += [run_of(prompt, "plain", 1 + 10.0 + i, rounds=rounds(10, (), ()))]
        made += [run_of(prompt, "auto", 1 + (10.0 + i) / times, rounds=own)]
    return [one.to_json() for one in made]


COST = [
    {"type": "cost", "context": context, "rows": rows, "median_s": 0.1, "relative": rows / 4}
    for context in (8, 64)
    for rows in (1, 4, 16)
]
BATCH = [
    {
        "type": "batch_summary", "concurrency": n, "plain_tokens_per_s": 10.0 * n,
        "tokens_per_s": 15.0 * n, "ratio": 1.5, "decode_ratio": 1.6, "worst": 1.4,
    }
    for n in (1, 4)
]  # fmt: skip
KV = [
    {
        "type": "kv", "tier": tier, "num_tokens": 99, "num_cached_tokens": 96, "ttft_s": seconds,
        "speedup": 1 / seconds, "floor_s": floor,
    }
    for tier, seconds, floor in (("cold", 1.0, None), ("disk", 0.1, 0.01))
]  # fmt: skip
QUALITY = [
    {
        "type": "quality", "text": "<prompts>", "reference_perplexity": 10.0, "perplexity": 10.1,
        "perplexity_change": 0.01, "divergence": 0.003, "same_choice": 0.96,
    }
]  # fmt: skip

MLPERF = [
    {
        "type": "mlperf", "contender": "auto", "scenario": "Server", "mode": "performance",
        "valid": True, "metrics": {"tokens_per_s": 12.5, "ttft_p99_s": 0.25},
    }
]  # fmt: skip

LOAD = [
    {
        "type": "load", "concurrency": n, "speculation": mode, "tokens_per_s": 30.0 * n,
        "num_requests": 8, "num_failed": 0, "ttft_p50_s": 0.1 * n, "ttft_p99_s": 0.2 * n,
        "itl_p50_s": 0.01, "itl_p99_s": 0.02, "tpot_p50_s": 0.03, "tpot_p99_s": 0.04,
        "acceptance_length": 2.5,
    }
    for n in (1, 4)
    for mode in (True, False)
] + [
    {"type": "load_ratio", "concurrency": n, "ratio": 1.75, "worst": 1.25, "num_pairs": 3}
    for n in (1, 4)
]  # fmt: skip


def estimate_of(value: float) -> dict[str, Any]:
    """A statistic with its interval, as a line has it."""
    return {"value": value, "low": value - 0.25, "high": value + 0.25, "count": 4}


ABLATION = [
    {
        "type": "ablation_summary", "part": part, "decode_tokens_per_s": 40.0,
        "to_plain": None if part == "plain" else estimate_of(2.5), "to_plain_total": None,
        "to_full": estimate_of(0.75), "tokens_per_round": 2.25, "nodes_per_round": 7.5,
        "num_groups": 4, "num_texts": 4, "num_identical": 4,
    }
    for part in ("plain", "all parts", "no controller")
]  # fmt: skip
BEAMS = [
    {
        "type": "beams_summary", "num_beams": 4, "tokens_per_s": 12.5,
        "transformers_tokens_per_s": 6.25, "ratio": estimate_of(2.0), "worst": 1.5,
        "num_prompts": 6, "num_identical": 6,
    }
]  # fmt: skip
GRAMMAR = [
    {
        "type": "grammar_summary", "drafter": "plain", "free_ms": 30.0, "grammar_ms": 31.0,
        "per_token": estimate_of(1.03), "per_round": estimate_of(1.02), "num_prompts": 5,
        "num_identical": 0, "num_compared": 0, "num_in_form": 5,
    }
]  # fmt: skip

RECORDS: dict[str, tuple[list[dict[str, Any]], list[str]]] = {
    "compare": (runs(), ["speedup", "acceptance", "shares"]),
    "cost": (COST, ["cost"]),
    "batch": (BATCH, ["batch"]),
    "kv": (KV, ["tiers"]),
    "quality": (QUALITY, ["quality"]),
    "mlperf": (MLPERF, []),
    "peers": (runs(), ["peers", "acceptance", "shares"]),
    "serve": (LOAD, ["load"]),
    "ablate": (ABLATION, ["ablation"]),
    "beams": (BEAMS, []),
    "grammar": (GRAMMAR, []),
}


def spec_runs() -> list[dict[str, Any]]:
    """The runs as turns of questions in Spec-Bench's groups."""
    groups = {"a": "qa", "b": "rag"}
    return [{**r, "prompt": f"{r['prompt']}#1", "kind": groups[r["kind"]]} for r in runs()]


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """A record of every command."""
    made = [
        write(tmp_path / f"{command}.jsonl", [fingerprint(command), *rows])
        for command, (rows, _) in RECORDS.items()
    ]
    return [*made, write(tmp_path / "spec.jsonl", [fingerprint("spec"), *spec_runs()])]


class Addresses(HTMLParser):
    """Collects what a page would load, and what its pictures are."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.pictures: list[bytes] = []
        self.descriptions: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        assert tag not in ("script", "link", "iframe")
        self.loaded += [str(given[name]) for name in ("src", "href", "srcset") if name in given]
        if tag == "img":
            self.pictures.append(base64.b64decode(str(given["src"]).partition("base64,")[2]))
            self.descriptions.append(str(given["alt"]))


@pytest.mark.parametrize("command", RECORDS)
def test_each_record_has_its_pictures(command: str, tmp_path: Path) -> None:
    rows, names = RECORDS[command]
    record = load_record(write(tmp_path / "r.jsonl", [fingerprint(command), *rows]))
    drawn = list(plots(record))
    assert [plot.name for plot in drawn] == names
    for plot in drawn:
        assert plot.png().startswith(PNG)


def test_the_page_needs_nothing_else(files: list[Path], tmp_path: Path) -> None:
    out, folder = tmp_path / "report.html", tmp_path / "plots"
    names = [str(path) for path in files]
    assert run_command(["bench", "report", *names, "--out", str(out), "--plots", str(folder)]) == 0
    text = out.read_text(encoding="utf-8")
    page = Addresses()
    page.feed(text)
    assert page.loaded
    assert all(address.startswith("data:image/svg+xml;base64,") for address in page.loaded)
    assert "url(" not in text.partition("</style>")[0]
    assert "@import" not in text
    assert len(page.pictures) == len(list(folder.glob("*.png"))) == 15
    assert all(page.descriptions)
    for picture in page.pictures:
        ElementTree.fromstring(picture)  # well-formed
        assert b'href="http' not in picture
    assert "A &lt;CPU&gt; &amp; co" in text
    assert "&lt;prompts&gt;" in text
    assert (folder / "compare-speedup.png").read_bytes().startswith(PNG)


def test_the_tables_hold_what_the_runs_say(files: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    make_report([load_record(path) for path in files], out)
    cells = re.findall(r"<td>(.*?)</td>", out.read_text(encoding="utf-8"))
    assert {"Server", "True", "12.5", "0.25"} <= set(cells)
    assert {"on", "off", "1.75"} <= set(cells), "load"
    assert {"no controller", "2.50 (2.25 to 2.75)", "0.75 (0.50 to 1.00)"} <= set(cells), "ablate"
    assert {"1.02 (0.77 to 1.27)", "1.03 (0.78 to 1.28)"} <= set(cells), "grammar"
    assert "2.00 (2.00 to 2.00)" in cells  # compare: every prompt decodes twice as fast
    spec = next(path for path in files if path.name == "spec.jsonl")
    value = speedups(load_record(spec))["auto"][ALL].value
    own = [11 / (1 + (10 + i) / 2) for i in range(4)]
    plain = [11 / (11 + i) for i in range(4)]
    assert value == pytest.approx(sum(own) / sum(plain))
    assert f"{value:.2f}x" in cells


def test_a_record_of_a_server_names_no_command(tmp_path: Path) -> None:
    """`bench serve` measures what answers at an address: it need not know the model."""
    head = {"type": "fingerprint", "environment": ENVIRONMENT, "target": "url"}
    record = load_record(write(tmp_path / "load.jsonl", [head, *LOAD]))
    assert (record.command, record.model) == ("load", "url")
    out = tmp_path / "report.html"
    make_report([record], out)
    assert "<h2>load: url</h2>" in out.read_text(encoding="utf-8")


def test_intervals() -> None:
    values = [1.0, 2.0, 3.0, 4.0, 100.0]
    one = estimate(values, middle)
    assert one.value == 3.0
    assert one.low is not None
    assert one.high is not None
    assert 1.0 <= one.low < 3.0 < one.high <= 100.0
    assert estimate(values, middle) == one, "the same values, the same interval"
    assert estimate([1.0, 3.0], mean).low is None
    assert estimate([1.0, 3.0], mean).value == 2.0
    assert estimate([(4.0, 1.0), (2.0, 2.0)], ratio_of_means).value == 2.0
    same = estimate([2.0] * 9, mean)
    assert (same.value, same.low, same.high) == (2.0, 2.0, 2.0)


def test_an_interval_holds_the_truth_as_often_as_it_says() -> None:
    import random

    rng = random.Random(1)
    held = 0
    for _ in range(100):
        one = estimate([rng.gauss(5, 1) for _ in range(40)], mean)
        held += one.low is not None and one.high is not None and one.low <= 5 <= one.high
    assert 86 <= held <= 100


@pytest.mark.parametrize("text", ["", "nonsense\n", '{"type": "run"}\n', '{"a": 1}\n', "[1]\n"])
def test_what_is_no_record_is_named(text: str, tmp_path: Path) -> None:
    path = tmp_path / "odd.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"odd\.jsonl"):
        load_record(path)


def test_without_matplotlib_the_extra_is_named(
    files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtraError, match=r"draftwood\[bench\]"):
        make_report([load_record(files[0])], tmp_path / "report.html")
