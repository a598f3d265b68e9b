"""Options of `draftwood serve --ray`, and what they come to."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from draftwood.cli.options import ModelOptions
from draftwood.errors import ConfigError

if TYPE_CHECKING:
    from draftwood.deploy.ray.start import Plan
    from draftwood.serve.start import ServeOptions

_RAY = "Ray (more than one process)"

Ray = Annotated[
    bool,
    typer.Option("--ray", help="Run the model in replicas on Ray.", rich_help_panel=_RAY),
]
Replicas = Annotated[
    int | None,
    typer.Option(help="Copies of the model. Default: 1.", show_default=False, rich_help_panel=_RAY),
]
MaxReplicas = Annotated[
    int | None,
    typer.Option(
        help="As many when there is much to do. Default: as --replicas.",
        show_default=False,
        rich_help_panel=_RAY,
    ),
]
DraftActors = Annotated[
    int | None,
    typer.Option(
        help="Copies of the --draft model in processes of their own, which draft while the "
        "target verifies. Default: it drafts in the replicas.",
        show_default=False,
        rich_help_panel=_RAY,
    ),
]
RayAddress = Annotated[
    str | None,
    typer.Option(
        metavar="ADDRESS",
        help="A running Ray cluster: host:port, or auto. Default: one is started here.",
        show_default=False,
        rich_help_panel=_RAY,
    ),
]
ReplicaGPUs = Annotated[
    float | None,
    typer.Option(
        help="GPUs of a replica or draft actor; a share of one is possible. Default: 1 on CUDA.",
        show_default=False,
        rich_help_panel=_RAY,
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class RayOptions:
    """What was given on the command line; None for nothing."""

    ray: bool = False
    replicas: int | None = None
    max_replicas: int | None = None
    draft_actors: int | None = None
    ray_address: str | None = None
    replica_gpus: float | None = None

    def check(self, model: ModelOptions) -> None:
        """Finds what does not go together, before anything is loaded.

        Raises:
            ConfigError: some of it.
        """
        given = {
            "replicas": self.replicas,
            "max-replicas": self.max_replicas,
            "draft-actors": self.draft_actors,
            "ray-address": self.ray_address,
            "replica-gpus": self.replica_gpus,
        }
        for name, value in given.items():
            if value is not None and not self.ray:
                raise ConfigError(f"{name} is {value}: that needs --ray")
        least = {"replicas": 1, "max-replicas": self.replicas or 1, "draft-actors": 0}
        for name, bound in least.items():
            value = given[name]
            if isinstance(value, int) and value < bound:
                raise ConfigError(f"{name} is {value}: it must be at least {bound}")
        if self.replica_gpus is not None and not self.replica_gpus > 0:
            raise ConfigError(f"replica-gpus is {self.replica_gpus}: it must be above 0")
        if self.draft_actors and (model.draft is None or model.no_speculation):
            raise ConfigError(
                f"draft-actors is {self.draft_actors}: they need a model, which --draft names"
            )
        if self.draft_actors and model.drafter not in (None, "auto", "model"):
            raise ConfigError(
                f"drafter is {model.drafter!r}: with --draft-actors use 'auto' or 'model'"
            )
        if self.ray and model.device is not None and ":" in model.device:
            raise ConfigError(f"device is {model.device!r}: Ray chooses which: use cuda or cpu")


def run_on_ray(
    given: RayOptions,
    model: ModelOptions,
    options: ServeOptions,
    sock: socket.socket,
    ready: Callable[[], None],
) -> int:
    """Serves; returns the exit code."""
    from draftwood.cli.loading import quiet
    from draftwood.cli.running import interruptible
    from draftwood.models.progress import shown_progress
    from draftwood.models.sources import resolve

    quiet()
    with interruptible(), shown_progress(sys.stderr) as progress:
        for name in (model.model, model.draft):
            if name is not None:  # once, and not in each replica
                resolve(name, progress=progress)
        from draftwood.deploy.ray.start import serve_on_ray

        plan = _plan(given, model, options)
    return serve_on_ray(plan, sock, ready)


def _plan(given: RayOptions, model: ModelOptions, options: ServeOptions) -> Plan:
    from draftwood.arguments import device_of
    from draftwood.deploy.ray.application import Layout
    from draftwood.deploy.ray.cluster import Need
    from draftwood.deploy.ray.draft_actor import DraftSettings
    from draftwood.deploy.ray.replica import ReplicaSettings
    from draftwood.deploy.ray.start import Plan

    replicas = given.replicas or 1
    most, drafts = given.max_replicas or replicas, given.draft_actors or 0
    device = device_of(model.device).type
    gpus = (given.replica_gpus or 1.0) if device == "cuda" else 0.0
    cpus = max((os.cpu_count() or 1) // (most + drafts), 1)
    layout = Layout(
        replicas=replicas,
        max_replicas=most,
        draft_actors=drafts,
        replica=Need("replica", replicas, cpus, gpus),
        draft=Need("draft actor", drafts, cpus, gpus),
        drain_s=options.drain_timeout_s,
        name=f"draftwood-{os.getpid()}",  # others may serve on the same cluster
    )
    plain = model.no_speculation
    settings = ReplicaSettings(
        model=model.model,
        draft=None if plain or drafts else model.draft,
        drafter="none" if plain else model.drafter,
        device=device,
        dtype=model.dtype,
        quantization=model.quantization,
        max_model_len=model.max_model_len,
        config=model.config,
        name=options.names[0],
        max_queue=options.max_queue,
    )
    draft = None
    if drafts:
        assert model.draft is not None
        draft = DraftSettings(
            model=model.draft, target=model.model, device=device, dtype=model.dtype
        )
    return Plan(
        settings=settings,
        draft=draft,
        layout=layout,
        options=options,
        address=given.ray_address,
    )
