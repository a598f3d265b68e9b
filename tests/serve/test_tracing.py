"""Traces: what a collector is told of a request, and that nobody waits for the collector."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from draftwood.cli.app import run
from draftwood.errors import ConfigError, MissingExtraError
from draftwood.llm import LLM
from draftwood.serve.tracing import Tracing, otlp_tracing, wanted
from tests.serve.conftest import MODEL, Live, serving, wait_until

BODY: dict[str, Any] = {"prompt": "the quick brown fox", "max_tokens": 12, "ignore_eos": True}
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


class Traced:
    """A server whose spans are kept."""

    def __init__(self, live: Live, exporter: InMemorySpanExporter) -> None:
        self.live = live
        self._exporter = exporter

    def ask(self, body: dict[str, Any], path: str = "/v1/completions", **headers: str) -> Any:
        """Asks; the reply, and the spans of it by name."""
        self._exporter.clear()
        reply = self.live.ask("POST", path, body, headers)
        return reply, self.spans()

    def spans(self) -> dict[str, ReadableSpan]:
        """What was kept, once a request's own span has ended."""
        kept = self._exporter.get_finished_spans
        assert wait_until(lambda: any(span.kind is SpanKind.SERVER for span in kept()))
        return {span.name: span for span in kept()}

    def all(self) -> tuple[ReadableSpan, ...]:
        """All that was kept."""
        return self._exporter.get_finished_spans()


@pytest.fixture(scope="module")
def traced(make_llm: Callable[..., LLM]) -> Generator[Traced]:
    exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracing = Tracing(provider, MODEL)
    with serving(make_llm(), tracing=tracing) as live:
        yield Traced(live, exporter)
    tracing.close()


def test_a_request_has_a_span_and_one_for_each_phase(traced: Traced) -> None:
    before = time.time_ns()
    reply, spans = traced.ask(BODY | {"temperature": 0.5, "seed": 7, "priority": 2})
    after = time.time_ns()
    assert set(spans) == {"text_completion tiny", "queue", "prefill", "decode"}
    whole = spans["text_completion tiny"]
    phases = [spans[name] for name in ("queue", "prefill", "decode")]
    for span in phases:
        assert span.parent is not None
        assert span.parent.span_id == whole.context.span_id
        assert span.context.trace_id == whole.context.trace_id
    moments = [phases[0].start_time, *(span.end_time for span in phases)]
    assert moments == sorted(moments)
    assert [span.start_time for span in phases[1:]] == [span.end_time for span in phases[:-1]]
    millisecond = 1_000_000  # two clocks are compared
    assert before - millisecond <= moments[0]
    assert moments[-1] <= after + millisecond

    facts = dict(whole.attributes or {})
    assert facts["gen_ai.operation.name"] == "text_completion"
    assert facts["gen_ai.request.model"] == facts["gen_ai.response.model"] == MODEL
    assert facts["gen_ai.request.max_tokens"] == 12
    assert facts["gen_ai.request.temperature"] == 0.5
    assert facts["gen_ai.request.seed"] == 7
    assert facts["gen_ai.response.id"] == reply.json["id"]
    assert facts["gen_ai.response.finish_reasons"] == ("length",)
    assert facts["gen_ai.usage.input_tokens"] == reply.json["usage"]["prompt_tokens"]
    assert facts["gen_ai.usage.output_tokens"] == 12
    assert facts["draftwood.request.priority"] == 2
    assert facts["draftwood.request_id"] == reply.headers["x-request-id"]
    assert facts["http.response.status_code"] == 200
    assert "gen_ai.request.stream" not in facts
    told = reply.json["metrics"]["speculative_decoding"]
    decode = dict(spans["decode"].attributes or {})
    assert decode["draftwood.speculation.rounds"] == told["num_spec_steps"]
    assert decode["draftwood.speculation.draft_tokens"] == told["num_draft_tokens"]
    assert decode["draftwood.speculation.accepted_tokens"] == told["num_accepted_draft_tokens"]
    # Nothing of what was said is in it.
    shown = " ".join(str(span.to_json()) for span in spans.values())
    assert "quick" not in shown
    assert reply.json["choices"][0]["text"] not in shown


def test_the_senders_span_is_the_parent(traced: Traced) -> None:
    _, spans = traced.ask(BODY, traceparent=f"00-{TRACE}-00f067aa0ba902b7-01", tracestate="a=b")
    whole = spans["text_completion tiny"]
    assert f"{whole.context.trace_id:032x}" == TRACE
    assert whole.parent is not None
    assert f"{whole.parent.span_id:016x}" == "00f067aa0ba902b7"
    assert whole.context.trace_state.get("a") == "b"
    _, fresh = traced.ask(BODY, traceparent="00-rubbish-01")
    assert fresh["text_completion tiny"].parent is None


def test_who_did_not_sample_is_not_recorded(traced: Traced) -> None:
    traced.ask(BODY)
    count = len(traced.all())
    reply = traced.live.ask(
        "POST", "/v1/completions", BODY, {"traceparent": f"00-{TRACE}-00f067aa0ba902b7-00"}
    )
    assert reply.status == 200
    traced.live.assert_idle()
    assert len(traced.all()) == count


def test_a_stream_and_its_outputs(traced: Traced) -> None:
    body = {"messages": [{"role": "user", "content": "the fox"}], "max_tokens": 5, "n": 2}
    _, spans = traced.ask(body | {"stream": True, "ignore_eos": True}, "/v1/chat/completions")
    facts = spans["chat tiny"].attributes or {}
    assert facts["gen_ai.request.stream"] is True
    assert facts["gen_ai.request.choice.count"] == 2
    assert facts["gen_ai.usage.output_tokens"] == 10
    first_s = facts["gen_ai.response.time_to_first_chunk"]
    assert isinstance(first_s, float)
    assert 0 < first_s < 10
    assert sum(span.name == "decode" for span in traced.all()) == 2


def test_what_is_refused_or_breaks_off_is_told_apart(traced: Traced) -> None:
    _, spans = traced.ask(BODY | {"temperature": 9})
    [refused] = spans.values()
    assert refused.attributes is not None
    assert refused.attributes["http.response.status_code"] == 400
    assert refused.attributes["error.type"] == "400"
    assert refused.status.status_code is StatusCode.UNSET  # the sender's mistake, not the server's
    _, spans = traced.ask(BODY | {"max_tokens": 200, "timeout": 0.0001})
    late = spans["text_completion tiny"].attributes or {}
    assert late["http.response.status_code"] == 408
    assert late["error.type"] == "408"


def test_an_engine_that_fails_is_an_error(traced: Traced, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(traced.live.llm.engine, "step", fail)
    reply, spans = traced.ask(BODY)
    assert reply.status == 500
    assert spans["text_completion tiny"].status.status_code is StatusCode.ERROR
    assert traced.live.ask("POST", "/v1/completions", BODY).status == 200


def test_other_paths_have_no_span(traced: Traced) -> None:
    traced.ask(BODY)
    count = len(traced.all())
    assert traced.live.ask("GET", "/health").status == 200
    assert traced.live.ask("POST", "/tokenize", {"prompt": "the"}).status == 200
    assert len(traced.all()) == count


def test_it_is_off_unless_asked_for() -> None:
    assert not wanted(None, {})
    assert wanted("http://here:4318", {})
    assert wanted(None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://here:4318"})
    assert not wanted("http://here:4318", {"OTEL_SDK_DISABLED": "true"})
    with pytest.raises(ConfigError, match="http://host:4318"):
        otlp_tracing("here:4318", MODEL)


def test_a_wrong_endpoint_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", "smollm2-135m", "--otlp-endpoint", "host"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(MissingExtraError, match=r"draftwood\[otel\]"):
        otlp_tracing("http://localhost:4318", MODEL)


class _Collector(BaseHTTPRequestHandler):
    """Takes what exporters send."""

    got: list[tuple[str, ExportTraceServiceRequest]]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("content-encoding") == "gzip":
            import gzip

            body = gzip.decompress(body)
        self.got.append((self.path, ExportTraceServiceRequest.FromString(body)))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *args: Any) -> None:
        """Nothing."""


def test_a_collector_gets_them_by_otlp(make_llm: Callable[..., LLM]) -> None:
    _Collector.got = []
    collector = ThreadingHTTPServer(("127.0.0.1", 0), _Collector)
    thread = Thread(target=collector.serve_forever)
    thread.start()
    try:
        tracing = otlp_tracing(f"http://127.0.0.1:{collector.server_port}", MODEL)
        with serving(make_llm(), tracing=tracing) as live:
            assert live.ask("POST", "/v1/completions", BODY).status == 200
        tracing.close()
    finally:
        collector.shutdown()
        thread.join()
        collector.server_close()
    [(path, message)] = _Collector.got
    assert path == "/v1/traces"
    [resource] = message.resource_spans
    names = {item.key: item.value.string_value for item in resource.resource.attributes}
    assert names["service.name"] == "draftwood"
    [scope] = resource.scope_spans
    assert {span.name for span in scope.spans} == {
        *("text_completion tiny", "queue", "prefill", "decode"),
    }


def test_nobody_waits_for_a_collector_that_is_gone(make_llm: Callable[..., LLM]) -> None:
    tracing = otlp_tracing("http://127.0.0.1:1", MODEL)
    with serving(make_llm(), tracing=tracing) as live:
        begin = time.monotonic()
        for _ in range(20):
            assert live.ask("POST", "/v1/completions", BODY).status == 200
        assert time.monotonic() - begin < 5
        live.assert_idle()
    begin = time.monotonic()
    tracing.close()
    assert time.monotonic() - begin < 5
