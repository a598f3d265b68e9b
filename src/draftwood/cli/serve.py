"""`draftwood serve`: a model behind OpenAI's API."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from draftwood.cli import options as opt
from draftwood.cli import ray as on_ray
from draftwood.cli.loading import timed_load
from draftwood.errors import ConfigError, MissingExtraError

if TYPE_CHECKING:
    pass

_SERVER = "Server"
_LIMITS = "Limits"
_KEYS = "DRAFTWOOD_API_KEY"

Host = Annotated[str, typer.Option(help="Address to listen on.", rich_help_panel=_SERVER)]
Port = Annotated[
    int, typer.Option(min=0, max=65535, help="0 takes a free one.", rich_help_panel=_SERVER)
]
ServedName = Annotated[
    list[str] | None,
    typer.Option(
        help="What clients call the model; may be repeated. Default: MODEL.",
        show_default=False,
        rich_help_panel=_SERVER,
    ),
]
ApiKey = Annotated[
    list[str] | None,
    typer.Option(
        help=f"A key that clients must send; may be repeated. `sha256:HEX` is the hash of one. "
        f"Default: those in {_KEYS}, separated by spaces; none opens the API to all.",
        show_default=False,
        rich_help_panel=_SERVER,
    ),
]
Cors = Annotated[
    list[str] | None,
    typer.Option(
        metavar="ORIGIN",
        help="Pages from there may read answers; may be repeated.",
        show_default=False,
        rich_help_panel=_SERVER,
    ),
]
AllowedHost = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME",
        help="A further name for this server in requests, when it listens on this machine only.",
        show_default=False,
        rich_help_panel=_SERVER,
    ),
]
LogFormat = Annotated[
    Literal["text", "json"], typer.Option(help="Of log lines.", rich_help_panel=_SERVER)
]
MaxNumSeqs = Annotated[
    int, typer.Option(min=1, help="Most texts generated at once.", rich_help_panel=_LIMITS)
]
MaxBatchTokens = Annotated[
    int,
    typer.Option(
        min=1,
        help="Most rows of one forward; longer prompts are computed in chunks.",
        rich_help_panel=_LIMITS,
    ),
]
MaxQueue = Annotated[
    int,
    typer.Option(
        min=0,
        help="Most texts that wait beside them; further requests get 429.",
        rich_help_panel=_LIMITS,
    ),
]
MaxBody = Annotated[str, typer.Option(help="Largest request body.", rich_help_panel=_LIMITS)]
RequestTimeout = Annotated[
    float | None,
    typer.Option(
        help="Most seconds a request may take, unless it says so itself. Default: no limit.",
        show_default=False,
        rich_help_panel=_LIMITS,
    ),
]
DrainTimeout = Annotated[
    float,
    typer.Option(
        min=0,
        help="Seconds that running requests have to end after SIGTERM.",
        rich_help_panel=_LIMITS,
    ),
]


def serve(
    model: opt.ModelName,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    served_model_name: ServedName = None,
    api_key: ApiKey = None,
    cors: Cors = None,
    allowed_host: AllowedHost = None,
    log_format: LogFormat = "text",
    max_num_seqs: MaxNumSeqs = 16,
    max_batch_tokens: MaxBatchTokens = 512,
    max_queue: MaxQueue = 128,
    max_body: MaxBody = "8M",
    request_timeout: RequestTimeout = None,
    drain_timeout: DrainTimeout = 30.0,
    draft: opt.Draft = None,
    drafter: opt.Drafter = None,
    no_speculation: opt.NoSpeculation = False,
    tree_nodes: opt.TreeNodes = 32,
    device: opt.Device = None,
    dtype: opt.DType = None,
    quantization: opt.Quantization = None,
    max_model_len: opt.MaxModelLen = None,
    kv_memory: opt.KVMemory = None,
    kv_disk: opt.KVDisk = None,
    kv_redis: opt.KVRedis = None,
    ray: on_ray.Ray = False,
    replicas: on_ray.Replicas = None,
    max_replicas: on_ray.MaxReplicas = None,
    draft_actors: on_ray.DraftActors = None,
    ray_address: on_ray.RayAddress = None,
    replica_gpus: on_ray.ReplicaGPUs = None,
) -> None:
    """Serve a model with OpenAI's API, many requests at a time.

    It listens on this machine only, unless --host says otherwise; then set an --api-key. SIGTERM
    lets running requests end.
    """
    _need_extra()
    model_options = opt.ModelOptions(
        model=model,
        draft=draft,
        drafter=drafter,
        no_speculation=no_speculation,
        tree_nodes=tree_nodes,
        device=device,
        dtype=dtype,
        quantization=quantization,
        max_model_len=max_model_len,
        kv_memory=kv_memory,
        kv_disk=kv_disk,
        kv_redis=kv_redis,
        max_num_seqs=max_num_seqs,
        max_batch_tokens=max_batch_tokens,
    )
    ray_options = on_ray.RayOptions(
        ray=ray,
        replicas=replicas,
        max_replicas=max_replicas,
        draft_actors=draft_actors,
        ray_address=ray_address,
        replica_gpus=replica_gpus,
    )
    ray_options.check(model_options)
    from draftwood.serve.access import ApiKeys, allowed_hosts, is_loopback
    from draftwood.serve.logs import set_up_logging
    from draftwood.serve.run import bind, url_of
    from draftwood.serve.start import ServeOptions, make_server

    _check_seconds("request-timeout", request_timeout)
    options = ServeOptions(
        names=tuple(served_model_name or [_name(model)]),
        keys=ApiKeys(api_key or os.environ.get(_KEYS, "").split()),
        hosts=allowed_hosts(host, allowed_host or ()),
        cors=tuple(cors or ()),
        max_body=opt.parse_bytes("max-body", max_body),
        max_queue=max_queue,
        timeout_s=request_timeout,
        drain_timeout_s=drain_timeout,
    )
    sock = bind(host, port)
    with sock:
        llm = None if ray else timed_load(model_options)[0]
        set_up_logging(log_format)
        if not is_loopback(host) and not options.keys:
            print(f"warning: {host} can be reached without an API key", file=sys.stderr)

        def ready() -> None:
            print(f"serving {options.names[0]} at {url_of(sock)}", flush=True)

        if llm is None:
            code = on_ray.run_on_ray(ray_options, model_options, options, sock, ready)
        else:
            server = make_server(llm, options, sock, ready)
            with llm:
                code = server.run()
    raise typer.Exit(code)


def _need_extra() -> None:
    for package in ("fastapi", "uvicorn", "prometheus_client"):
        try:
            import_module(package)
        except ImportError as error:
            raise MissingExtraError(package.replace("_", "-"), "server") from error


def _check_seconds(name: str, seconds: float | None) -> None:
    if seconds is not None and not seconds > 0:
        raise ConfigError(f"{name} is {seconds}: it must be a number of seconds above 0")


def _name(model: str) -> str:
    """What a model is called when nobody says: a path's last part, else the name as it is."""
    path = Path(model)
    return (
        path.resolve().stem if path.is_file() else path.resolve().name if path.is_dir() else model
    )
