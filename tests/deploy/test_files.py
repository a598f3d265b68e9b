"""The files of deploy/: linters, schemas, and what they ask of the command line."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from draftwood.cli.app import app
from draftwood.serve.run import _GRACE_S
from tests.deploy.servers import ROOT
from tests.services import need

DEPLOY = ROOT / "deploy"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
UNIT = (DEPLOY / "systemd/draftwood.service").read_text(encoding="utf-8")
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))
CLUSTER = list(
    yaml.safe_load_all((DEPLOY / "kubernetes/draftwood.yaml").read_text(encoding="utf-8"))
)
YAML_RULES = """{extends: default, rules: {document-start: disable, line-length: {max: 120},
  comments: {min-spaces-from-content: 1}}}"""


def instruction(name: str) -> str:
    """The last one of that name in the Dockerfile, its lines joined."""
    joined = DOCKERFILE.replace("\\\n", " ")
    return re.findall(rf"^{name} (.+)$", joined, re.MULTILINE)[-1]


def run(*command: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Runs a program; what it says is in the failure."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, **options)
    assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout}{done.stderr}"
    return done


def tool(name: str) -> str:
    """A linter of the environment that the tests run in."""
    return str(Path(sys.executable).parent / name)


# --- linters ----------------------------------------------------------------------------------


def test_hadolint_has_nothing_to_say() -> None:
    run(tool("hadolint"), "--failure-threshold", "style", str(DEPLOY / "Dockerfile"))


def test_compose_keeps_to_its_schema() -> None:
    schema = ["--builtin-schema", "vendor.compose-spec"]
    run(tool("check-jsonschema"), *schema, str(DEPLOY / "compose.yaml"))


@pytest.mark.parametrize("version", ["1.30.0", "1.37.0"])
def test_kubernetes_knows_every_field(version: str) -> None:
    file = str(DEPLOY / "kubernetes/draftwood.yaml")
    done = run(tool("kubernetes-validate"), "--strict", "-k", version, file)
    assert (done.stdout + done.stderr).count("passed") == len(CLUSTER)


def test_yamllint_has_nothing_to_say() -> None:
    files = [str(path) for path in DEPLOY.rglob("*") if path.suffix in (".yml", ".yaml")]
    assert len(files) >= 6
    run(tool("yamllint"), "--strict", "-d", YAML_RULES, *files)


def test_systemd_understands_the_unit(tmp_path: Path) -> None:
    need("systemd-analyze", "systemd")
    unit = tmp_path / "draftwood.service"
    unit.write_text(UNIT.replace("/opt/draftwood/bin/draftwood", "/bin/true"))
    done = run("systemd-analyze", "verify", "--man=no", str(unit))
    assert unit.name not in done.stdout + done.stderr


# --- the command lines ------------------------------------------------------------------------


def command_lines() -> dict[str, list[str]]:
    """What each file runs, after `draftwood`."""
    [start] = re.findall(r"^ExecStart=\S+/draftwood (.+)$", UNIT, re.MULTILINE)
    [workload] = [one for one in CLUSTER if one["kind"] == "StatefulSet"]
    [container] = workload["spec"]["template"]["spec"]["containers"]
    return {
        "Dockerfile": json.loads(instruction("CMD")),
        "compose": COMPOSE["services"]["server"]["command"],
        "kubernetes": container["args"],
        "systemd": shlex.split(start.replace(" $DRAFTWOOD_OPTIONS", "")),
    }


def parsed(file: str) -> dict[str, Any]:
    """What the command line makes of it; it refuses an option that it does not know."""
    name, *arguments = command_lines()[file]
    group = typer.main.get_command(app)
    command = group.get_command(None, name)  # type: ignore[attr-defined]
    options: dict[str, Any] = command.make_context(name, arguments).params
    return options


@pytest.mark.parametrize("file", command_lines())
def test_serve_takes_the_options(file: str) -> None:
    options = parsed(file)
    assert options["model"]
    if file != "systemd":  # the others are reached from outside of their container
        assert (options["host"], options["port"]) == ("0.0.0.0", 8000)


def test_a_stop_leaves_time_to_drain() -> None:
    """What stops a server waits for longer than it lets running requests go on."""
    drain_s = max(parsed(file)["drain_timeout"] for file in command_lines()) + _GRACE_S
    assert drain_s > _GRACE_S
    [workload] = [one for one in CLUSTER if one["kind"] == "StatefulSet"]
    pod = workload["spec"]["template"]["spec"]
    sleep, seconds = pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    assert sleep == "sleep"
    assert pod["terminationGracePeriodSeconds"] > int(seconds) + drain_s
    probe = pod["containers"][0]["readinessProbe"]
    assert int(seconds) > probe["periodSeconds"] * probe["failureThreshold"]
    assert int(COMPOSE["services"]["server"]["stop_grace_period"].rstrip("s")) > drain_s
    [stop] = re.findall(r"^TimeoutStopSec=(\d+)$", UNIT, re.MULTILINE)
    assert int(stop) > drain_s
    assert instruction("STOPSIGNAL") == "SIGTERM"


def test_kubernetes_objects_find_each_other() -> None:
    services = [one for one in CLUSTER if one["kind"] == "Service"]
    [workload] = [one for one in CLUSTER if one["kind"] == "StatefulSet"]
    spec, labels = workload["spec"], workload["spec"]["template"]["metadata"]["labels"]
    [container] = spec["template"]["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert spec["selector"]["matchLabels"].items() <= labels.items()
    assert spec["serviceName"] in [one["metadata"]["name"] for one in services]
    for one in services:
        assert one["spec"]["selector"].items() <= labels.items()
        assert all(port["targetPort"] in ports for port in one["spec"]["ports"])
    for probe in ("startupProbe", "readinessProbe"):
        assert container[probe]["httpGet"]["path"] == "/health"
        assert container[probe]["httpGet"]["port"] in ports
    claims = {one["metadata"]["name"] for one in spec["volumeClaimTemplates"]}
    assert {mount["name"] for mount in container["volumeMounts"]} <= claims
    user = spec["template"]["spec"]["securityContext"]["runAsUser"]
    assert str(user) == instruction("USER")
    assert f"--uid {user} " in DOCKERFILE


# --- the image --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the Dockerfile copies, and nothing else."""
    folder = tmp_path_factory.mktemp("build")
    for line in re.findall(r"^COPY (.+)$", DOCKERFILE, re.MULTILINE):
        *names, target = line.split()
        for name in names:
            source, goal = ROOT / name, folder / target
            if source.is_dir():
                shutil.copytree(source, goal, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, goal)
    return folder


def test_the_image_installs_what_was_tested(context: Path) -> None:
    """Its pip command resolves, to exactly the versions that are installed here."""
    install = next(line for line in DOCKERFILE.splitlines() if '".[' in line)
    arguments = shlex.split(install.rstrip("\\ ").removeprefix("RUN pip install"))
    done = run(
        sys.executable,
        *("-m", "pip", "--disable-pip-version-check", "install", "--dry-run", "--quiet"),
        *("--report", "report.json", *arguments),
        cwd=context,
    )
    report = json.loads((context / "report.json").read_text(encoding="utf-8"))
    names = [one["metadata"]["name"] for one in report["install"]]
    assert names == ["draftwood"], done.stdout


def test_the_images_entry_point_starts(context: Path, tmp_path: Path) -> None:
    """Built from the copied files alone, and run from a folder that has none of them."""
    site = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    run(*pip, "--no-deps", "--target", str(site), str(context))
    [entry] = json.loads(instruction("ENTRYPOINT"))
    code = "import draftwood; print(draftwood.__file__)"
    environment = os.environ | {"PYTHONPATH": str(site)}
    found = run(sys.executable, "-c", code, cwd=tmp_path, env=environment).stdout
    assert found.startswith(str(site))
    command = [sys.executable, str(site / "bin" / entry), "serve", "--help"]
    assert "--drain-timeout" in run(*command, cwd=tmp_path, env=environment).stdout
