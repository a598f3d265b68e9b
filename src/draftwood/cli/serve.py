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
from draftwood.cli.groups import Loading, flat
from draftwood.cli.loading import timed_load
from draftwood.errors import ConfigError, MissingExtraError

if TYPE_CHECKING:
    pass

_SERVER = "Server"
_LIMITS = "Limits"
_CRASHES = "Crashes and lost connections"
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
OtlpEndpoint = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="Send traces to this OpenTelemetry collector, http://host:4318. Default: what "
        "OTEL_EXPORTER_OTLP_ENDPOINT says; none sends none.",
        show_default=False,
        rich_help_panel=_SERVER,
    ),
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
Checkpoint = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="A folder in which running requests are saved: after a crash the same command goes on "
        "with them, and clients get the rest.",
        show_default=False,
        rich_help_panel=_CRASHES,
    ),
]
CheckpointEvery = Annotated[
    float,
    typer.Option(
        metavar="SECONDS", help="Seconds between two checkpoints.", rich_help_panel=_CRASHES
    ),
]
ReconnectGrace = Annotated[
    float,
    typer.Option(
        metavar="SECONDS",
        min=0,
        help="How long a request runs on without a client, if it has an X-Request-Id.",
        rich_help_panel=_CRASHES,
    ),
]
KeepAnswers = Annotated[
    float,
    typer.Option(
        metavar="SECONDS",
        min=0,
        help="How long its answer is kept.",
        rich_help_panel=_CRASHES,
    ),
]
KeepBytes = Annotated[
    str,
    typer.Option(help="Most bytes of kept answers.", rich_help_panel=_CRASHES),
]


@flat
def serve(
    model: opt.ModelName,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    served_model_name: ServedName = None,
    api_key: ApiKey = None,
    cors: Cors = None,
    allowed_host: AllowedHost = None,
    log_format: LogFormat = "text",
    otlp_endpoint: OtlpEndpoint = None,
    max_num_seqs: MaxNumSeqs = 16,
    max_batch_tokens: MaxBatchTokens = 512,
    max_queue: MaxQueue = 128,
    max_body: MaxBody = "8M",
    request_timeout: RequestTimeout = None,
    drain_timeout: DrainTimeout = 30.0,
    checkpoint: Checkpoint = None,
    checkpoint_every: CheckpointEvery = 5.0,
    reconnect_grace: ReconnectGrace = 60.0,
    keep_answers: KeepAnswers = 600.0,
    keep_bytes: KeepBytes = "256M",
    ray: on_ray.Ray = False,
    replicas: on_ray.Replicas = None,
    max_replicas: on_ray.MaxReplicas = None,
    draft_actors: on_ray.DraftActors = None,
    ray_address: on_ray.RayAddress = None,
    replica_gpus: on_ray.ReplicaGPUs = None,
    *,
    loading: Loading,
) -> None:
    """Serve a model with OpenAI's API, many requests at a time.

    It listens on this machine only, unless --host says otherwise; then set an --api-key. SIGTERM
    lets running requests end.
    """
    need_extra()
    model_options = loading.of(
        model,
        max_num_seqs=max_num_seqs,
        max_batch_tokens=max_batch_tokens,
        checkpoint=checkpoint,
        checkpoint_every=checkpoint_every,
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
    from draftwood.serve.held import RecoveryOptions
    from draftwood.serve.logs import set_up_logging
    from draftwood.serve.run import bind, url_of
    from draftwood.serve.start import ServeOptions, make_server
    from draftwood.serve.tracing import otlp_tracing, wanted

    _check_seconds("request-timeout", request_timeout)
    names = tuple(served_model_name or [_name(model)])
    tracing = otlp_tracing(otlp_endpoint, names[0]) if wanted(otlp_endpoint) else None
    options = ServeOptions(
        names=names,
        keys=ApiKeys(api_key or os.environ.get(_KEYS, "").split()),
        hosts=allowed_hosts(host, allowed_host or ()),
        cors=tuple(cors or ()),
        max_body=opt.parse_bytes("max-body", max_body),
        max_queue=max_queue,
        timeout_s=request_timeout,
        drain_timeout_s=drain_timeout,
        tracing=tracing,
        recovery=RecoveryOptions(
            grace_s=reconnect_grace,
            keep_s=keep_answers,
            keep_bytes=opt.parse_bytes("keep-bytes", keep_bytes),
        ),
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
        if tracing is not None:
            tracing.close()
    raise typer.Exit(code)


def need_extra() -> None:
    """Makes sure that what a server needs is installed.

    Raises:
        MissingExtraError: it is not; the message says how to install it.
    """
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
