"""OpenTelemetry traces: a span for each request, below it how long it waited, was read, and wrote.

Names are those of OpenTelemetry's conventions for generative AI and HTTP, and `draftwood.` before
our own. Spans are made on the event loop when a request has ended, from the moments that its
sequences noted; the engine's thread knows nothing of them. They are sent by a thread of the SDK's,
from a queue that drops what is too much for it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from threading import Thread
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from draftwood import __version__
from draftwood.engine.sequence import Sequence
from draftwood.errors import ConfigError, MissingExtraError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

    from draftwood.serve.responder import Responder

ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PATH = "/v1/traces"
_OPERATIONS = {"/v1/chat/completions": "chat", "/v1/completions": "text_completion"}
_END_S = 3.0

Attributes = Mapping[str, Any]


def wanted(endpoint: str | None, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether traces are to be sent: an endpoint is given, here or to OpenTelemetry itself."""
    if environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False
    return bool(endpoint or any(environ.get(name) for name in ENDPOINT_VARIABLES))


def otlp_tracing(endpoint: str | None, model_name: str) -> Tracing:
    """Traces that are sent by OTLP over HTTP.

    Args:
        endpoint: of a collector, http://host:4318; None leaves it to OpenTelemetry's variables.
        model_name: what clients call the model.

    Raises:
        ConfigError: the endpoint is no URL.
        MissingExtraError: OpenTelemetry's SDK is not installed.
    """
    url = None if endpoint is None else _url(endpoint)
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise MissingExtraError("opentelemetry-sdk", "otel") from error
    facts = {"service.version": __version__}
    if not os.environ.get("OTEL_SERVICE_NAME"):
        facts["service.name"] = "draftwood"
    provider = TracerProvider(resource=Resource.create(facts), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url)))
    return Tracing(provider, model_name)


def _url(endpoint: str) -> str:
    """Where traces go; a collector's address alone means its usual path."""
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ConfigError(f"otlp-endpoint is {endpoint!r}: write http://host:4318")
    return endpoint if parts.path.strip("/") else endpoint.rstrip("/") + _PATH


class Tracing:
    """Makes the spans of requests.

    Args:
        provider: of tracers; it is shut down by `close`.
        model_name: what clients call the model.
    """

    def __init__(self, provider: TracerProvider, model_name: str) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._model_name = model_name
        self._tracer = provider.get_tracer("draftwood", __version__)
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, scope: Scope) -> Span:
        """A request has come. A `traceparent` header makes its sender's span the parent."""
        from opentelemetry.trace import SpanKind

        headers = Headers(scope=scope)
        carrier = {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}
        operation = _OPERATIONS[scope["path"]]
        return self._tracer.start_span(
            f"{operation} {self._model_name}",
            context=self._propagator.extract(carrier),
            kind=SpanKind.SERVER,
            attributes={
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "draftwood",
                "gen_ai.request.model": self._model_name,
                "http.request.method": scope["method"],
                "http.route": scope["path"],
                "url.path": scope["path"],
                "url.scheme": scope["scheme"],
            },
        )

    def end(self, span: Span, status: int | None, state: Mapping[str, Any]) -> None:
        """It has been answered.

        Args:
            span: from `begin`.
            status: of the response; None when there was none.
            state: what the layers below noted of the request.
        """
        from opentelemetry.trace import Status, StatusCode

        note = state.get("note")
        code = status or 499
        span.set_attribute("http.response.status_code", code)
        span.set_attribute("draftwood.request_id", state.get("request_id", ""))
        if code >= 400:
            span.set_attribute("error.type", str(code))
        if code >= 500:
            span.set_status(Status(StatusCode.ERROR))
        responder = None if note is None else note.responder
        if responder is not None:
            span.set_attributes(_request_facts(responder))
            for seq in _sequences(responder):
                self._phases(span, seq)
        span.end()

    def _phases(self, parent: Span, seq: Sequence) -> None:
        """The spans below a request's: one for each phase that an output came to."""
        from opentelemetry.trace import set_span_in_context

        epoch_ns = time.time_ns() - time.perf_counter_ns()  # of the clock that sequences use
        context = set_span_in_context(parent)
        for name, begin_s, end_s, facts in _phases(seq):
            begin_ns, end_ns = (epoch_ns + round(moment * 1e9) for moment in (begin_s, end_s))
            span = self._tracer.start_span(
                name, context, attributes=facts, start_time=min(begin_ns, end_ns)
            )
            span.end(end_ns)

    def close(self) -> None:
        """Sends what is left, for a few seconds at most: the SDK itself would try for long."""
        thread = Thread(target=self._provider.shutdown, name="draftwood-traces", daemon=True)
        thread.start()
        thread.join(_END_S)


class Traced:
    """The layer around all others that gives generating requests their spans.

    Args:
        app: the application.
        tracing: makes them.
    """

    def __init__(self, app: ASGIApp, tracing: Tracing) -> None:
        self._app = app
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Lets a request through, and ends its span when it is answered."""
        if scope["type"] != "http" or scope["path"] not in _OPERATIONS:
            await self._app(scope, receive, send)
            return
        span = self._tracing.begin(scope)
        state = scope.setdefault("state", {})
        state["traced"] = True
        if span.get_span_context().is_valid:
            state["trace_id"] = f"{span.get_span_context().trace_id:032x}"
        status: int | None = None

        async def sent(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, sent)
        finally:
            self._tracing.end(span, status, state)
            # A connection that is kept open keeps its last request's state.
            if (note := state.get("note")) is not None:
                note.responder = None


def _sequences(responder: Responder) -> Iterator[Sequence]:
    for generation in responder.generations:
        yield from generation.seqs


def _request_facts(responder: Responder) -> Attributes:
    """What was asked and what came, in OpenTelemetry's words; no text."""
    params = responder.generations[0].params
    seqs = list(_sequences(responder))
    times = [seq.metrics for seq in seqs]
    firsts = [one.first_token_s - one.arrival_s for one in times if one.first_token_s is not None]
    facts = {
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.top_k": params.top_k or None,
        "gen_ai.request.frequency_penalty": params.frequency_penalty or None,
        "gen_ai.request.presence_penalty": params.presence_penalty or None,
        "gen_ai.request.choice.count": params.n if params.n > 1 else None,
        "gen_ai.request.stream": responder.streams or None,
        "gen_ai.response.id": responder.id,
        "gen_ai.response.model": responder.model,
        "gen_ai.response.finish_reasons": [s.finish_reason for s in seqs if s.finish_reason],
        "gen_ai.response.time_to_first_chunk": min(firsts, default=None),
        "gen_ai.usage.input_tokens": sum(len(one.prompt_ids) for one in responder.generations),
        "gen_ai.usage.output_tokens": sum(len(s.output_ids) for s in seqs),
        "gen_ai.usage.cache_read.input_tokens": sum(
            one.seqs[0].metrics.num_cached_tokens for one in responder.generations if one.seqs
        ),
        "draftwood.request.priority": responder.generations[0].priority,
        "draftwood.request.speculation": params.speculation,
    }
    # A seed of 64 bits may be no 64-bit number with a sign, which is all that a span can hold.
    if params.seed is not None and params.seed < 2**63:
        facts["gen_ai.request.seed"] = params.seed
    return {name: value for name, value in facts.items() if value is not None}


def _phases(seq: Sequence) -> Iterator[tuple[str, float, float, Attributes]]:
    """(name, begin, end, attributes) of the phases that a sequence came to."""
    metrics = seq.metrics
    end_s = time.perf_counter() if metrics.finish_s is None else metrics.finish_s
    own: dict[str, Any] = {"draftwood.output_id": seq.request_id}
    start_s, first_s = metrics.start_s, metrics.first_token_s
    yield "queue", metrics.arrival_s, end_s if start_s is None else start_s, own
    if start_s is None:
        return
    tiers = {f"draftwood.cached_tokens.{tier}": n for tier, n in metrics.cached_by_tier.items()}
    prompt = {
        "gen_ai.usage.input_tokens": seq.num_prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": metrics.num_cached_tokens,
    }
    yield "prefill", start_s, end_s if first_s is None else first_s, own | prompt | tiers
    if first_s is None:
        return
    spec = "draftwood.speculation"
    yield (
        "decode",
        first_s,
        end_s,
        own
        | {
            "gen_ai.usage.output_tokens": len(seq.output_ids),
            f"{spec}.enabled": seq.params.speculation,
            f"{spec}.rounds": metrics.num_rounds,
            f"{spec}.draft_tokens": metrics.num_draft_tokens,
            f"{spec}.accepted_tokens": metrics.num_accepted_tokens,
            f"{spec}.acceptance_rate": metrics.acceptance_rate,
            f"{spec}.mean_acceptance_length": metrics.mean_acceptance_length,
            "draftwood.forced_tokens": metrics.num_forced_tokens,
        },
    )
