"""A real model behind the API says what it says without a server."""

from __future__ import annotations

from draftwood.llm import LLM
from draftwood.sampling import SamplingParams
from tests.serve.conftest import MODEL, serving


def test_a_real_model_says_the_same_over_http(real_llm: LLM) -> None:
    messages = [{"role": "user", "content": "Name three rivers."}]
    direct = real_llm.chat(messages, SamplingParams(max_tokens=24, temperature=0.0))
    with serving(real_llm) as live, live.client() as client:
        whole = client.chat.completions.create(
            model=MODEL,
            messages=messages,  # type: ignore[arg-type]
            max_tokens=24,
            temperature=0,
            logprobs=True,
        )
        stream = client.chat.completions.create(
            model=MODEL,
            messages=messages,  # type: ignore[arg-type]
            max_tokens=24,
            temperature=0,
            stream=True,
            extra_body={"speculation": False},
        )
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    [choice] = whole.choices
    assert choice.message.content == streamed == direct.text
    assert choice.logprobs is not None
    content = choice.logprobs.content or []
    raw = b"".join(bytes(one.bytes or ()) for one in content)
    assert raw.decode() == direct.text
