"""`draftwood kv`: what the stores of KV hold, and making room."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer

from draftwood.cache import human_bytes
from draftwood.cli import options as opt
from draftwood.config import EngineConfig
from draftwood.errors import ConfigError, StoreError

if TYPE_CHECKING:
    from draftwood.kv.tiers import BlockStore, StoredBlock

_TIMEOUT_S = 5.0
_DAMAGED = 1

app = typer.Typer(
    help="Look after KV that was kept on disk or in Redis.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)


@app.callback()
def _main() -> None:
    """Look after KV that was kept on disk or in Redis."""


@app.command(name="ls", epilog=opt.example("draftwood kv ls --kv-disk ~/kv"))
def ls(
    kv_disk: opt.KVDisk = None,
    kv_redis: opt.KVRedis = None,
    kv_namespace: opt.KVNamespace = "draftwood",
    as_json: opt.Json = False,
) -> None:
    """List the blocks: key, size, how long unused, whose."""
    with _stores(kv_disk, kv_redis, kv_namespace) as stores:
        rows = [(store.name, block) for store in stores for block in store.ls()]
    rows.sort(key=lambda row: (row[0], row[1].idle_s or 0.0, row[1].key))
    if as_json:
        _print_json([_block_record(*row) for row in rows])
        return
    _table(
        ["store", "key", "size", "unused", "model", "draft part"],
        [_block_row(*row) for row in rows],
    )


@app.command(epilog=opt.example("draftwood kv stats --kv-disk ~/kv --kv-redis redis://cache:6379"))
def stats(
    kv_disk: opt.KVDisk = None,
    kv_redis: opt.KVRedis = None,
    kv_namespace: opt.KVNamespace = "draftwood",
    as_json: opt.Json = False,
) -> None:
    """Show how many blocks and bytes each store holds."""
    with _stores(kv_disk, kv_redis, kv_namespace) as stores:
        all_stats = [store.stats() for store in stores]
    if as_json:
        _print_json([asdict(one) for one in all_stats])
        return
    _table(
        ["store", "where", "blocks", "size"],
        [
            [one.name, one.place, str(one.num_blocks), human_bytes(one.num_bytes)]
            for one in all_stats
        ],
    )


@app.command(epilog=opt.example("draftwood kv clear --kv-disk ~/kv"))
def clear(
    kv_disk: opt.KVDisk = None,
    kv_redis: opt.KVRedis = None,
    kv_namespace: opt.KVNamespace = "draftwood",
    as_json: opt.Json = False,
) -> None:
    """Delete all blocks; nothing else in the folder or on the server is touched."""
    with _stores(kv_disk, kv_redis, kv_namespace) as stores:
        counts = {store.name: store.clear() for store in stores}
    if as_json:
        _print_json(counts)
        return
    for name, count in counts.items():
        print(f"{name}: {count} blocks deleted")


@app.command(epilog=opt.example("draftwood kv verify --kv-disk ~/kv"))
def verify(
    kv_disk: opt.KVDisk = None,
    kv_redis: opt.KVRedis = None,
    kv_namespace: opt.KVNamespace = "draftwood",
    as_json: opt.Json = False,
) -> None:
    """Read every block and delete the damaged ones; exit code 1 if there were any."""
    with _stores(kv_disk, kv_redis, kv_namespace) as stores:
        reports = {store.name: store.verify() for store in stores}
    if as_json:
        _print_json({name: asdict(report) for name, report in reports.items()})
    else:
        for name, report in reports.items():
            print(f"{name}: {report.num_good} sound, {report.num_bad} damaged and deleted")
    if any(report.num_bad for report in reports.values()):
        raise typer.Exit(_DAMAGED)


@contextmanager
def _stores(disk: str | None, redis: str | None, namespace: str) -> Iterator[list[BlockStore]]:
    """The stores that the options name.

    Raises:
        ConfigError: they name none.
        StoreError: one does not answer.
    """
    if disk is None and redis is None:
        raise ConfigError("no store is named: give --kv-disk DIR, --kv-redis URL or both")
    config = EngineConfig(
        kv_disk=disk, kv_redis=redis, kv_namespace=namespace, kv_timeout_s=_TIMEOUT_S
    )
    from draftwood.kv.tiers import make_stores

    stores = make_stores(config)
    try:
        yield stores
    except StoreError as error:
        reason = str(error).rstrip(".")
        raise StoreError(f"{reason}: is it there, and may you use it?") from error
    finally:
        for store in stores:
            store.close()


def _block_record(store: str, block: StoredBlock) -> dict[str, Any]:
    return {
        "store": store,
        "key": block.key.hex(),
        "num_bytes": block.num_bytes,
        "idle_s": block.idle_s,
        "model": block.labels.model if block.labels else None,
        "has_draft": block.has_draft,
    }


def _block_row(store: str, block: StoredBlock) -> list[str]:
    return [
        store,
        block.key.hex(),
        human_bytes(block.num_bytes),
        "" if block.idle_s is None else _duration(block.idle_s),
        block.labels.model if block.labels else "damaged",
        "yes" if block.has_draft else "no",
    ]


def _duration(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def _table(columns: list[str], rows: list[list[str]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*columns, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    Console(width=None if sys.stdout.isatty() else 200).print(table)


def _print_json(value: Any) -> None:
    print(json.dumps(value, ensure_ascii=False))
