"""The stack in deploy/: a real Prometheus answers every panel, rules are tested."""

from __future__ import annotations

import json
import re
import runpy
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from draftwood.sampling import SamplingParams
from draftwood.serve.metrics import Metrics
from tests.services import need
from tests.tiny import TinyLLM, random_prompts, tiny_llm

DEPLOY = Path(__file__).parents[2] / "deploy"
BOARD: dict[str, Any] = json.loads((DEPLOY / "grafana/draftwood.json").read_text(encoding="utf-8"))
PANELS = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
TARGETS = [(p["title"], t["refId"], t["expr"]) for p in PANELS for t in p["targets"]]

# --- the dashboard's file ---------------------------------------------------------------------


def test_the_dashboard_is_what_its_script_makes() -> None:
    made = runpy.run_path(str(DEPLOY / "grafana/make_dashboard.py"))["text"]()
    assert made == (DEPLOY / "grafana/draftwood.json").read_text(encoding="utf-8"), (
        "run python deploy/grafana/make_dashboard.py"
    )


def test_panels_have_ids_places_and_queries() -> None:
    """Ids and titles are unique, no two panels overlap, all lie on the grid and ask something."""
    ids = [panel["id"] for panel in BOARD["panels"]]
    assert len(set(ids)) == len(ids) > 25
    rows: dict[str, list[str]] = {}
    cells: set[tuple[int, int]] = set()
    row = ""
    for panel in BOARD["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        own = {
            (place["x"] + i, place["y"] + j) for i in range(place["w"]) for j in range(place["h"])
        }
        assert not own & cells, panel["title"]
        cells |= own
        if panel["type"] == "row":
            row = panel["title"]
            continue
        rows.setdefault(row, []).append(panel["title"])
        assert panel["description"].endswith(".")
        assert panel["datasource"]["uid"] == "${datasource}"
        refs = [target["refId"] for target in panel["targets"]]
        assert len(set(refs)) == len(refs) >= 1
    for titles in rows.values():
        assert len(set(titles)) == len(titles)


def test_expressions_name_metrics_that_exist() -> None:
    """Without a Prometheus too: each name is one that the server has, each variable is defined."""
    llm = tiny_llm(drafter="bushy", vocab_size=8)
    metrics = Metrics("tiny")
    metrics.bind(llm.engine)
    body, _ = metrics.render()
    names = set(re.findall(r"^# TYPE (\S+)", body.decode(), re.MULTILINE))
    variables = {one["name"] for one in BOARD["templating"]["list"]} | {"__rate_interval"}
    for _, _, expr in TARGETS:
        used = {
            re.sub("_(bucket|sum|count)$", "", name)
            for name in re.findall(r"(?:vllm|draftwood):[a-z0-9_]+", expr)
        }
        assert used
        assert used <= names
        assert set(re.findall(r"\$(\w+)", expr)) <= variables
        assert expr.count("(") == expr.count(")")
    rules = (DEPLOY / "prometheus/rules.yml").read_text(encoding="utf-8")
    recorded = set(re.findall(r"record: (\S+)", rules))
    used = set(re.findall(r"\b(?:vllm|draftwood):[a-z0-9_]+", rules))
    assert {name.removesuffix("_bucket") for name in used} <= names
    assert set(re.findall(r"model_name:[a-z0-9_:]+", rules)) == recorded


# --- the other files --------------------------------------------------------------------------


def test_the_compose_file_fits_together() -> None:
    """Services, the files they mount, whom they ask, and that nothing listens to the world."""
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))
    services = compose["services"]
    assert set(services) == {"server", "redis", "prometheus", "grafana"}
    for service in services.values():
        for port in service.get("ports", ()):
            assert port.startswith("127.0.0.1:")
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            assert (DEPLOY / source).exists() if source[0] == "." else source in compose["volumes"]
        image = service.get("image")
        assert image is None or re.fullmatch(r"[a-z/]+:v?\d[\w.-]+", image), "pin the image"
    build = services["server"]["build"]
    assert (DEPLOY / build["context"] / build["dockerfile"]).is_file()
    prometheus = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text("utf-8"))
    [job] = prometheus["scrape_configs"]
    [target] = job["static_configs"][0]["targets"]
    assert target.split(":")[0] in services
    folder = DEPLOY / "grafana/provisioning"
    [source] = yaml.safe_load((folder / "datasources/prometheus.yml").read_text("utf-8"))[
        "datasources"
    ]
    assert urllib.parse.urlsplit(source["url"]).hostname in services
    [provider] = yaml.safe_load((folder / "dashboards/draftwood.yml").read_text("utf-8"))[
        "providers"
    ]
    mounts = "".join(services["grafana"]["volumes"])
    assert f":{provider['options']['path']}/draftwood.json" in mounts


def test_the_image_gets_what_it_copies() -> None:
    """What the Dockerfile copies exists and is let in by its ignore file."""
    text = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    allowed = (DEPLOY / "Dockerfile.dockerignore").read_text(encoding="utf-8").split()
    copied = [word for line in re.findall(r"^COPY (.+) \S+$", text, re.M) for word in line.split()]
    assert len(copied) >= 4
    for name in copied:
        assert (DEPLOY.parent / name).exists()
        assert f"!{name}" in allowed


@pytest.mark.parametrize(
    "command",
    [
        ["check", "config", "prometheus.yml"],
        ["check", "rules", "rules.yml"],
        ["test", "rules", "rules_test.yml"],
    ],
    ids=" ".join,
)
def test_promtool_agrees(command: list[str]) -> None:
    need("promtool", "prometheus")
    done = subprocess.run(
        ["promtool", *command],
        cwd=DEPLOY / "prometheus",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


# --- a real Prometheus ------------------------------------------------------------------------


@dataclass(slots=True)
class Prometheus:
    """A running one."""

    url: str

    def get(self, path: str, **query: str) -> Any:
        """The `data` of an answer."""
        url = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{query}: {error.read().decode()}") from error

    def ask(self, expr: str) -> list[Any]:
        """The series that an expression gives now."""
        return list(self.get("query", query=expr)["result"])


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def serve(metrics: Metrics) -> ThreadingHTTPServer:
    """`/metrics` as a server has it, in a thread."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body, kind = metrics.render()
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            """Says nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def start(folder: Path, target: int) -> tuple[subprocess.Popen[bytes], Prometheus]:
    """Starts Prometheus on our rules and one target, scraped ten times a second."""
    config = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text("utf-8"))
    config["global"] = {
        "scrape_interval": "100ms",
        "scrape_timeout": "100ms",
        "evaluation_interval": "200ms",
    }
    config["rule_files"] = [str(DEPLOY / "prometheus/rules.yml")]
    config["scrape_configs"][0]["static_configs"][0]["targets"] = [f"127.0.0.1:{target}"]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
    port = free_port()
    process = subprocess.Popen(
        [
            "prometheus",
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    return process, Prometheus(f"http://127.0.0.1:{port}")


def work(llm: TinyLLM, metrics: Metrics, seed: int) -> None:
    """Three requests, run to their end; the same prompt comes back later."""
    prompts = random_prompts([20, 30, 24], vocab_size=8, seed=seed % 3)
    seqs = [llm.engine.add(p, SamplingParams(max_tokens=12)) for p in prompts]
    while llm.engine.has_work:
        llm.engine.step()
    for seq in seqs:
        metrics.on_finished(seq)


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """One that has watched a tiny server with a disk at work for some seconds."""
    need("prometheus")
    folder = tmp_path_factory.mktemp("prometheus")
    settings: dict[str, Any] = {"block_size": 4, "kv_disk": str(folder / "kv")}
    with tiny_llm(drafter="bushy", vocab_size=8, num_blocks=40, **settings) as llm:
        metrics = Metrics("tiny")
        metrics.bind(llm.engine)
        server = serve(metrics)
        process, prometheus = start(folder, server.server_address[1])
        try:
            end = time.monotonic() + 30
            for seed in range(10_000):
                work(llm, metrics, seed)
                if seed % 5 == 4 and has_seen_enough(prometheus):
                    break
                assert process.poll() is None, "prometheus has ended"
                assert time.monotonic() < end, "prometheus sees nothing"
            yield prometheus
        finally:
            process.kill()
            process.wait()
            server.shutdown()
            server.server_close()


def has_seen_enough(prometheus: Prometheus) -> bool:
    """Whether it has scraped for a while and evaluated the rules."""
    try:
        scrapes = prometheus.ask("count_over_time(up[1m])")
        recorded = prometheus.ask("model_name:draftwood_acceptance:ratio_rate5m")
    except (urllib.error.URLError, ConnectionError):
        time.sleep(0.1)
        return False
    return bool(scrapes and recorded) and float(scrapes[0]["value"][1]) >= 8


def fill(expr: str) -> str:
    """An expression with its variables set as Grafana sets them."""
    expr = expr.replace("$__rate_interval", "1m")
    return re.sub(r"\$(model_name|instance)", ".*", expr)


@pytest.mark.parametrize(("title", "ref", "expr"), TARGETS, ids=[f"{t}-{r}" for t, r, _ in TARGETS])
def test_every_panel_shows_something(
    prometheus: Prometheus, title: str, ref: str, expr: str
) -> None:
    """Each expression gives data, and numbers: no series is NaN throughout."""
    result = prometheus.ask(fill(expr))
    assert result, f"{title} {ref} is empty: {expr}"
    assert any(series["value"][1] != "NaN" for series in result)


def test_numbers_are_plausible(prometheus: Prometheus) -> None:
    """Shares sum up to one, tokens a round are what acceptance gives."""
    by_title = {title: fill(expr) for title, _, expr in reversed(TARGETS)}
    shares = [float(s["value"][1]) for s in prometheus.ask(by_title["Share of a round"])]
    assert sum(shares) == pytest.approx(1)
    [accepted] = prometheus.ask(by_title["Accepted"])
    assert 0 < float(accepted["value"][1]) < 1
    [per_round] = prometheus.ask(by_title["Tokens a round"])
    assert 1 < float(per_round["value"][1]) < 13
    positions = {
        s["metric"]["position"]: float(s["value"][1])
        for s in prometheus.ask(by_title["Accepted, by position"])
    }
    assert 1 >= positions["0"] >= positions["1"] > 0


def test_rules_are_evaluated_and_nothing_is_alarming(prometheus: Prometheus) -> None:
    groups = prometheus.get("rules")["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert len(rules) == 14
    assert {rule["health"] for rule in rules} == {"ok"}
    assert [one for one in prometheus.get("alerts")["alerts"] if one["state"] == "firing"] == []
    for rule in rules:
        if rule["type"] == "recording":
            assert prometheus.ask(rule["name"]), rule["name"]
