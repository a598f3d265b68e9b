"""Requests made from our own OpenAPI document: whatever they hold, the answer is one it names."""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.serve.conftest import Live

_GOOD = GenerationMode.POSITIVE
_PATHS = [
    ("/v1/chat/completions", "POST"),
    ("/v1/completions", "POST"),
    ("/tokenize", "POST"),
    ("/detokenize", "POST"),
    ("/v1/models/{model}", "GET"),
    ("/v1/models", "GET"),
    ("/health", "GET"),
    ("/version", "GET"),
]


# Threads of other tests draw from the global generator, and hypothesis takes that for ours.
@pytest.mark.filterwarnings("ignore:Do not use the `random` module")
@pytest.mark.parametrize(
    ("path", "method", "mode"),
    [
        (*place, mode)
        for place in _PATHS
        for mode in GenerationMode
        if place[1] == "POST" or mode is _GOOD  # without a body nothing can be wrong
    ],
)
def test_the_document_is_kept_to(live: Live, path: str, method: str, mode: GenerationMode) -> None:
    schema: Any = schemathesis.openapi.from_dict(live.ask("GET", "/openapi.json").json)
    schema.config.update(base_url=live.url)
    operation = schema[path][method]

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(
        max_examples=12,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def ask(case: Any) -> None:
        case.call_and_validate(
            checks=[
                not_a_server_error,
                status_code_conformance,
                content_type_conformance,
                response_schema_conformance,
            ]
        )

    ask()
