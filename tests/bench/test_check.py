"""`bench check`: numbers that are a record's pass; others, and those of something else, do not."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftwood.bench.check import Records, check_document
from draftwood.cli.app import run as run_command
from tests.bench.test_report import (
    ABLATION,
    BATCH,
    BEAMS,
    COST,
    GRAMMAR,
    KV,
    LOAD,
    QUALITY,
    fingerprint,
    runs,
    spec_runs,
    write,
)

PARAMS = {"max_tokens": 128, "temperature": 0.0}
ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Records: 4 prompts of 2 kinds, `auto` twice as fast as plain; and others."""
    made = tmp_path / "records"
    made.mkdir()
    write(made / "compare.jsonl", [fingerprint("compare", params=PARAMS), *runs()])
    write(made / "other.jsonl", [fingerprint("compare", params=PARAMS), *runs(3.0)])
    write(made / "spec.jsonl", [fingerprint("spec"), *spec_runs()])
    cost = [{**row, "min_s": 0.09, "repeats": 9} for row in COST]
    write(made / "cost.jsonl", [fingerprint("cost"), *cost])
    batch = [{**row, "num_texts": 4, "num_identical": 4} for row in BATCH]
    write(made / "batch.jsonl", [fingerprint("batch"), *batch])
    kv = [{**row, "min_s": row["ttft_s"], "num_bytes": 3_000_000} for row in KV]
    write(made / "kv.jsonl", [fingerprint("kv"), *kv])
    write(
        made / "quality.jsonl",
        [fingerprint("quality"), *[{**q, "num_tokens": 99} for q in QUALITY]],
    )
    more = {"load": LOAD, "ablation": ABLATION, "beams": BEAMS, "grammar": GRAMMAR}
    for name, rows in more.items():
        write(made / f"{name}.jsonl", [fingerprint(name), *rows])
    return made


def faults(folder: Path, text: str) -> list[str]:
    """What is wrong with a document."""
    path = folder.parent / "doc.md"
    path.write_text(text, encoding="utf-8")
    return [f"{fault.line}: {fault.message}" for fault in check_document(path, Records(folder))]


COMPARE = """# Title

4 prompts, 128 tokens. Record: `compare.jsonl`.

| | over plain, mean | worst prompt | same text |
|---|---|---|---|
| plain | 1.00 | 1.0 | 4 of 4 |
| `auto`, the default | 2.00 | 2.00 | 4 of 4 |
"""


def test_numbers_of_the_record_pass(folder: Path) -> None:
    assert faults(folder, COMPARE) == []


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("4 prompts", "5 prompts", 3),
        ("128 tokens", "129 tokens", 3),
        ("| 2.00 | 2.00 |", "| 2.01 | 2.00 |", 8),
        ("| 2.00 | 2.00 |", "| 2.00 | 2.1 |", 8),
        ("| 1.00 | 1.0 |", "| 2.00 | 1.0 |", 7),  # auto's number in plain's row
        ("| plain | 1.00 | 1.0 | 4 of 4 |", "| plain | 1.00 | 1.0 | 4 of 5 |", 7),
    ],
)
def test_a_number_that_is_not_there_is_found(folder: Path, old: str, new: str, line: int) -> None:
    assert old in COMPARE
    [fault] = faults(folder, COMPARE.replace(old, new))
    assert fault.startswith(f"{line}: ")
    assert "compare.jsonl" in fault


def test_rows_and_columns_say_what_a_number_is_of(folder: Path) -> None:
    text = "Record: `cost.jsonl`.\n\n| rows | context 8 |\n|---|---|\n| 4 | {} |\n"
    assert faults(folder, text.format("100.0")) == []
    assert faults(folder, text.replace("| 4 |", "| 5 |").format("100.0"))
    assert faults(folder, text.replace("context 8", "context 9").format("100.0"))
    kinds = (
        "Record: `compare.jsonl`.\n\n| kind | `auto` | plain |\n|---|---|---|\n| a | 2.0 | 1.0 |\n"
    )
    assert faults(folder, kinds) == []
    assert len(faults(folder, kinds.replace("2.0 | 1.0", "1.0 | 2.0"))) == 2


def test_every_kind_of_record_can_be_quoted(folder: Path) -> None:
    text = """# B
Record: `batch.jsonl`.

| at once | plain tokens/s | over plain |
|---|---|---|
| 4 | 40.0 | 1.50 |

# K
Record: `kv.jsonl`.

| from | ms | x cold | read |
|---|---|---|---|
| disk | 100 ms | 10.0x | 3.0 |

# Q
Record: `quality.jsonl`.

| text | change |
|---|---|
| <prompts> | +1.0 % |

# S
Record: `spec.jsonl`.

| | qa | overall |
|---|---|---|
| auto | {} | 1.85x |
"""
    assert faults(folder, text.format("1.84x")) == []
    assert len(faults(folder, text.format("1.95x"))) == 1


@pytest.mark.parametrize(
    ("record", "title", "label", "good", "bad"),
    [
        ("ablation", "over `all parts`", "no controller", "0.75", "2.50"),
        ("ablation", "over `plain`", "no controller", "2.50 (2.25 to 2.75)", "0.75"),
        ("ablation", "same texts", "no controller", "4 of 4", "5 of 4"),
        ("beams", "times `transformers`", "draftwood", "2.00", "12.5"),
        ("beams", "tokens/s", "draftwood", "12.5", "6.25"),
        ("beams", "same texts", "draftwood", "6 of 6", "7 of 7"),
        ("grammar", "ratio a token", "plain", "1.03", "1.02"),
        ("grammar", "ratio a round", "plain", "1.02", "1.03"),
        ("load", "with speculation on, tokens/s", "4", "120", "60"),
        ("load", "first text, ms", "4", "400", "401"),
        ("load", "times without", "4", "1.75", "1.85"),
    ],
)
def test_lines_that_are_not_runs_can_be_quoted(
    folder: Path, record: str, title: str, label: str, good: str, bad: str
) -> None:
    text = f"Record: `{record}.jsonl`.\n\n| requests | {title} |\n|---|---|\n| {label} | {{}} |\n"
    assert faults(folder, text.format(good)) == []
    assert faults(folder, text.format(bad))


def test_a_column_names_records_row_by_row(folder: Path) -> None:
    text = (
        "8 texts in all.\n\n| | `auto` over plain | texts | record |\n|---|---|---|---|\n"
        "| one | 2.0 | 4 | `compare.jsonl` |\n| two | 3.0 | 4 | `other.jsonl` |\n"
    )
    assert faults(folder, text) == []
    swapped = text.replace("`compare.jsonl`", "`x`").replace("`other.jsonl`", "`compare.jsonl`")
    assert [fault[:2] for fault in faults(folder, swapped.replace("`x`", "`other.jsonl`"))] == [
        "5:",
        "6:",
    ]


def test_what_is_not_looked_at(folder: Path) -> None:
    text = """Record: `compare.jsonl`. A model of 135M, 8-bit, `--limit 77`, 4 prompts.

    draftwood bench compare --max-tokens 999

```
| 1 | 2 | 77
```

<!-- no record -->
| | elsewhere, ms |
|---|---|
| 1 | 77 |

## Another heading, with 77

No record here: 77 of 80, `77 ms`, 95 % and 8 MiB.
"""
    assert faults(folder, text) == []
    assert len(faults(folder, text.replace("<!-- no record -->\n", ""))) >= 1


@pytest.mark.parametrize(
    "text", ["12 ms", "1.5x", "1.5 times", "92 tokens/s", "some 9 tokens a second"]
)
def test_what_is_measured_needs_a_record(folder: Path, text: str) -> None:
    [fault] = faults(folder, f"# Title\n\nOne says:\nthat takes {text} here.\n")
    assert fault.startswith("4: ")
    assert fault.endswith("is measured and names no record")


def test_a_base_and_a_part_are_looked_at(folder: Path) -> None:
    text = "Record: `compare.jsonl`.\n\n| | over `plain` | the target's part |\n|---|---|---|\n"
    assert faults(folder, text + "| `auto` | 2.00 | 70 % |\n") == []
    [fault] = faults(folder, text + "| `auto` | 2.00 | 10 % |\n")
    assert fault.startswith("5: 10 % (row 'auto', column")


def test_a_longer_name_is_not_its_beginning(folder: Path) -> None:
    """Contenders are called "llama.cpp" and "llama.cpp draft": the row names one of them."""
    rows = [{**r, "contender": r["contender"].replace("auto", "plain two")} for r in runs()]
    write(folder / "names.jsonl", [fingerprint("compare", params=PARAMS), *rows])
    text = "Record: `names.jsonl`.\n\n| | over plain |\n|---|---|\n| plain two | {} |\n"
    assert faults(folder, text.format("2.00")) == []
    assert len(faults(folder, text.format("1.00"))) == 1


def test_a_table_without_a_record_and_a_record_that_is_gone(folder: Path) -> None:
    for title, cell in (("b", "7 ms"), ("b", "7.0x"), ("tokens/s", "7"), ("times faster", "7")):
        assert faults(folder, f"| a | {title} |\n|---|---|\n| x | {cell} |\n") == [
            "3: the table has measurements and names no record"
        ]
    assert faults(folder, "| a | limit |\n|---|---|\n| x | 7 |\n") == []
    [fault] = faults(folder, "Record: `gone.jsonl`, 7.\n")
    assert "gone.jsonl cannot be read" in fault


def test_the_command(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder.parent / "doc.md"
    path.write_text(COMPARE.replace("2.00 |", "2.50 |", 1), encoding="utf-8")
    assert run_command(["bench", "check", str(path), "--records", str(folder)]) == 1
    assert "doc.md:8: 2.50 (row 'auto`, the default', column" in capsys.readouterr().out
    path.write_text(COMPARE, encoding="utf-8")
    assert run_command(["bench", "check", str(path), "--records", str(folder)]) == 0


def test_our_own_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `make bench-check` runs."""
    if not (ROOT / "benchmarks/records").is_dir():
        pytest.skip("no checkout")
    monkeypatch.chdir(ROOT)
    assert run_command(["bench", "check"]) == 0
