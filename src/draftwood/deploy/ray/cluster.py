"""A Ray cluster: one of our own on this machine, or one that is there already."""

from __future__ import annotations

import logging
import os
import shutil
import socket
import tempfile
import warnings
from dataclasses import dataclass, field
from typing import Any, Self

from draftwood.errors import CapacityError, ConfigError, MissingExtraError, first_line

_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Seconds between reports of how many requests there are, on which scaling rests.
    "RAY_SERVE_HANDLE_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1",
    "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1",
}
for _name, _value in _SETTINGS.items():
    os.environ.setdefault(_name, _value)

try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what its modules say of each other when they are imported
        import ray
        from ray import serve
except ImportError as error:
    raise MissingExtraError("ray", "ray") from error

NAMESPACE = "draftwood"
_KNOCK_S = 5.0
_STORE_BYTES = 80 << 20  # messages are small: Ray's least


@dataclass(frozen=True, slots=True)
class Need:
    """What one process of a kind takes of the cluster.

    Attributes:
        kind: "replica", for messages.
        count: processes that must fit from the start.
        cpus: logical processors, and threads, of each.
        gpus: of each; may be a share of one.
    """

    kind: str
    count: int
    cpus: int = 1
    gpus: float = 0.0

    @property
    def options(self) -> dict[str, Any]:
        """The same as Ray takes it. Ray tells OpenMP how many threads there are."""
        return {"num_cpus": self.cpus, "num_gpus": self.gpus}


@dataclass(slots=True)
class Cluster:
    """A connection to Ray, until `close`.

    Attributes:
        address: of a running cluster; None starts one here, which ends with this process.
        num_cpus: logical processors of one that is started here.
    """

    address: str | None = None
    num_cpus: int = 2
    _folder: str = field(default="", init=False)

    def __enter__(self) -> Self:
        """Connects.

        Raises:
            ConfigError: there is no cluster at that address.
            CapacityError: none could be started here.
        """
        settings: dict[str, Any] = {"namespace": NAMESPACE, "log_to_driver": False}
        if self.address is None:
            self._folder = tempfile.mkdtemp(prefix="dw-ray-")
            settings |= {
                "address": "local",
                "num_cpus": self.num_cpus,
                "include_dashboard": False,
                "object_store_memory": _STORE_BYTES,
                "_temp_dir": self._folder,
            }
        else:
            _knock(self.address)
            settings["address"] = self.address
        try:
            ray.init(logging_level=logging.ERROR, **settings)
        except Exception as error:  # Ray raises that class itself
            self.close()
            if self.address is None:
                raise CapacityError(f"Ray did not start: {first_line(error)}") from error
            raise ConfigError(
                f"ray-address is {self.address!r}: no Ray cluster answers there"
            ) from error
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends Serve's application and the connection; a cluster that was started here ends too."""
        if ray.is_initialized():
            # What it says of its own processes that we end is of no use to anybody.
            logging.getLogger("ray").setLevel(logging.CRITICAL)
            ray.shutdown()
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)

    def check(self, needs: list[Need]) -> None:
        """Makes sure that the cluster has what is asked for: Ray would wait for it for ever.

        Raises:
            CapacityError: it has not.
        """
        free = ray.available_resources()
        for name, label in (("CPU", "processors"), ("GPU", "GPUs")):
            asked = [(need, need.cpus if name == "CPU" else need.gpus) for need in needs]
            total = sum(need.count * each for need, each in asked)
            if total > free.get(name, 0.0) + 1e-6:
                parts = ", ".join(f"{n.count} x {each:g} ({n.kind})" for n, each in asked if each)
                raise CapacityError(
                    f"{total:g} {label} are needed ({parts}) and {free.get(name, 0.0):g} are free "
                    "in the Ray cluster: ask for fewer replicas or draft actors"
                )


def _knock(address: str) -> None:
    """Finds out soon what Ray takes two minutes for.

    Raises:
        ConfigError: nobody listens at an address of the form host:port.
    """
    host, _, port = address.rpartition(":")
    if address == "auto":
        return
    if not host or not port.isdigit() or "/" in host:
        raise ConfigError(
            f"ray-address is {address!r}: give host:port of a cluster's head, or auto"
        )
    try:
        socket.create_connection((host, int(port)), _KNOCK_S).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(f"ray-address is {address!r}: no Ray cluster answers there") from error


__all__ = ["NAMESPACE", "Cluster", "Need", "ray", "serve"]
