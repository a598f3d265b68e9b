"""The official client against a live server: chat and completions, whole and streamed."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from tests.serve.conftest import MODEL, Live

MESSAGES: Any = [{"role": "user", "content": "the quick brown fox"}]
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0}


def _streamed(chunks: Any) -> tuple[list[str], list[str | None]]:
    """The texts of a stream by index, and how each ended."""
    texts: dict[int, str] = {}
    reasons: dict[int, str | None] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            text = choice.text if hasattr(choice, "text") else choice.delta.content
            texts[choice.index] = texts.get(choice.index, "") + (text or "")
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    return [texts[i] for i in sorted(texts)], [reasons[i] for i in sorted(texts)]


def test_the_model_is_listed_and_found(client: openai.OpenAI) -> None:
    [card] = client.models.list()
    assert (card.id, card.object) == (MODEL, "model")
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-5")


def test_a_chat_streams_what_it_says_whole(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(messages=MESSAGES, max_tokens=24, **GREEDY)
    chunks = list(
        client.chat.completions.create(
            messages=MESSAGES,
            max_completion_tokens=24,
            stream=True,
            stream_options={"include_usage": True},
            **GREEDY,
        )
    )
    [choice] = whole.choices
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert len(set(choice.message.content)) > 5  # a text that says nothing proves nothing
    assert _streamed(chunks) == ([choice.message.content], [choice.finish_reason])
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.usage is None for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens <= 24
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_completion_streams_what_it_says_whole(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"prompt": "a tree of tokens", "max_tokens": 20, **GREEDY}
    whole = client.completions.create(**asked)
    chunks = client.completions.create(stream=True, **asked)
    assert _streamed(chunks) == ([whole.choices[0].text], [whole.choices[0].finish_reason])
    assert whole.object == "text_completion"
    assert whole.usage is not None
    again = client.completions.create(**asked)
    assert again.usage is not None
    assert again.usage.prompt_tokens_details is not None
    cached = again.usage.prompt_tokens_details.cached_tokens
    assert cached is not None
    assert cached % 16 == 0


def test_the_text_does_not_depend_on_speculation(client: openai.OpenAI) -> None:
    def text(**extra: Any) -> str:
        asked: dict[str, Any] = {"prompt": "def add(first", "max_tokens": 40, "seed": 5}
        return client.completions.create(model=MODEL, extra_body=extra, **asked).choices[0].text

    limits = {"max_tree_nodes": 1}, {"max_draft_depth": 1}, {"max_draft_depth": 0}
    others = {"speculation": False}, {"priority": 3}
    assert len({text(), *(text(**one) for one in (*limits, *others))}) == 1


def test_speculation_is_limited_by_request(client: openai.OpenAI) -> None:
    """The metrics of each answer show what its fields allowed."""

    def spec(**extra: Any) -> dict[str, Any]:
        text = client.completions.create(
            model=MODEL, prompt="the fox the fox the", max_tokens=40, seed=5, extra_body=extra
        )
        assert text.model_extra is not None
        found: dict[str, Any] = text.model_extra["metrics"]["speculative_decoding"]
        return found

    assert spec(ignore_eos=True)["num_draft_tokens"] > 0
    for plain in ({"speculation": False}, {"max_tree_nodes": 0}, {"max_draft_depth": 0}):
        assert spec(ignore_eos=True, **plain)["num_draft_tokens"] == 0
    low = spec(ignore_eos=True, max_draft_depth=1)
    assert len(low["acceptance_histogram"]) <= 2  # 0 or 1 accepted, never more
    few = spec(ignore_eos=True, max_tree_nodes=2)
    assert few["num_draft_tokens"] <= 2 * few["num_spec_steps"]


def test_prompts_may_be_texts_or_ids_one_or_many(client: openai.OpenAI, live: Live) -> None:
    texts = ["the lazy dog", "naïve café 東京"]
    ids = [live.ask("POST", "/tokenize", {"prompt": t}).json["tokens"] for t in texts]

    def ask(prompt: Any, **more: Any) -> list[str]:
        answer = client.completions.create(prompt=prompt, max_tokens=8, **GREEDY, **more)
        assert [choice.index for choice in answer.choices] == list(range(len(answer.choices)))
        return [choice.text for choice in answer.choices]

    alone = [ask(text)[0] for text in texts]
    assert ask(texts) == ask(ids) == alone
    assert ask(ids[0]) == alone[:1]
    assert ask(texts, n=2) == [alone[0], alone[0], alone[1], alone[1]]
    assert ask(texts, echo=True) == [t + a for t, a in zip(texts, alone, strict=True)]
    assert ask(texts[0], echo=True, extra_body={"max_tokens": 0}) == texts[:1]


def test_several_outputs_differ_and_come_again_with_the_seed(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"prompt": "the", "max_tokens": 12, "n": 3, "seed": 11, "model": MODEL}
    first = [choice.text for choice in client.completions.create(**asked).choices]
    assert len(set(first)) == 3
    assert [choice.text for choice in client.completions.create(**asked).choices] == first
    assert _streamed(client.completions.create(stream=True, **asked))[0] == first
    one = client.completions.create(**(asked | {"n": 1, "seed": 12})).choices[0].text
    assert one == first[1]


def test_a_stop_string_ends_the_text_before_it(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"prompt": "the quick", "max_tokens": 30, **GREEDY}
    text = client.completions.create(**asked).choices[0].text
    stop = text[6:9]
    cut = text[: text.index(stop)]
    whole = client.completions.create(stop=[stop], **asked).choices[0]
    assert (whole.text, whole.finish_reason) == (cut, "stop")
    assert whole.model_extra is not None
    assert whole.model_extra["stop_reason"] == stop
    assert _streamed(client.completions.create(stop=stop, stream=True, **asked))[0] == [cut]


def test_logprobs_of_a_chat_belong_to_its_tokens(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 10, **GREEDY}
    choice = client.chat.completions.create(logprobs=True, top_logprobs=3, **asked).choices[0]
    assert choice.logprobs is not None
    content = choice.logprobs.content
    assert content
    raw = b"".join(bytes(one.bytes or ()) for one in content)
    assert raw.decode("utf-8", "replace").startswith(
        (choice.message.content or "").rstrip("\ufffd")
    )
    for one in content:
        assert len(one.top_logprobs) == 3
        assert one.logprob == one.top_logprobs[0].logprob  # greedy takes the likeliest
        assert one.logprob <= 0
    streamed = []
    for chunk in client.chat.completions.create(
        logprobs=True, top_logprobs=3, stream=True, **asked
    ):
        if chunk.choices[0].logprobs:
            streamed += chunk.choices[0].logprobs.content or []
    assert [one.bytes for one in streamed] == [one.bytes for one in content]


def test_logprobs_of_an_echoed_prompt_are_there(client: openai.OpenAI) -> None:
    prompt = "the lazy dog"
    answer = client.completions.create(prompt=prompt, logprobs=2, echo=True, max_tokens=4, **GREEDY)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.token_logprobs is not None
    assert logprobs.text_offset is not None
    assert logprobs.top_logprobs is not None
    assert answer.usage is not None
    assert len(logprobs.tokens) == answer.usage.total_tokens
    assert logprobs.token_logprobs[0] is None
    assert None not in logprobs.token_logprobs[1:]
    assert logprobs.text_offset[0] == 0
    assert logprobs.text_offset == sorted(logprobs.text_offset)
    place = logprobs.text_offset[answer.usage.prompt_tokens]
    assert answer.choices[0].text[:place] == prompt


def test_biases_and_lengths_act(client: openai.OpenAI, live: Live) -> None:
    [token] = live.ask("POST", "/tokenize", {"prompt": "a"}).json["tokens"]
    asked: dict[str, Any] = {"prompt": "the", "max_tokens": 6, **GREEDY}
    biased = client.completions.create(logit_bias={str(token): 100}, **asked)
    assert biased.choices[0].text == "aaaaaa"
    banned = client.completions.create(
        logit_bias={str(token): 100}, extra_body={"bad_words": ["a"]}, **asked
    )
    assert "a" not in banned.choices[0].text
    one = client.completions.create(**(asked | {"max_tokens": 1}))
    assert one.usage is not None
    assert (one.usage.completion_tokens, one.choices[0].finish_reason) == (1, "length")


def test_the_last_chunk_tells_how_it_went(client: openai.OpenAI) -> None:
    chunks = list(
        client.completions.create(
            prompt="the quick brown fox jumps over the quick brown fox",
            max_tokens=30,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"rounds": True},
            **GREEDY,
        )
    )
    assert chunks[-1].model_extra is not None
    metrics = chunks[-1].model_extra["metrics"]
    spec = metrics["speculative_decoding"]
    assert sum(spec["acceptance_histogram"]) == spec["num_spec_steps"]
    accepted = sum(k * count for k, count in enumerate(spec["acceptance_histogram"]))
    assert accepted == spec["num_accepted_draft_tokens"]
    assert metrics["tokens_per_s"] > 0
    rounds = [
        record
        for chunk in chunks[:-1]
        for record in ((chunk.model_extra or {}).get("draftwood") or {}).get("rounds", [])
    ]
    assert chunks[-1].usage is not None
    assert sum(record["new_tokens"] for record in rounds) == chunks[-1].usage.completion_tokens
    assert "".join(record["new_text"] for record in rounds) == _streamed(chunks)[0][0]
    assert sum(len(record["tokens"]) - 1 for record in rounds) == spec["num_draft_tokens"]
    for record in rounds:
        size = len(record["tokens"])
        assert all(
            len(record[name]) == size for name in ("token_ids", "parents", "scores", "sources")
        )
        assert record["path"][0] == 0
        assert record["total_s"] >= record["draft_s"] + record["target_s"] > 0


def test_counts_can_come_with_every_chunk(client: openai.OpenAI) -> None:
    chunks = client.chat.completions.create(
        messages=MESSAGES,
        max_tokens=6,
        stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},  # type: ignore[typeddict-unknown-key]
        **GREEDY,
    )
    counts = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage]
    assert counts == sorted(counts)
    assert counts[-1] == counts[-2]


def test_the_async_client_gets_many_answers_at_once(client: openai.OpenAI, live: Live) -> None:
    prompts = ["the", "a tree", "def", "東京", "user"]

    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key="none") as asking:

            async def one(prompt: str) -> str:
                stream = await asking.completions.create(
                    prompt=prompt, max_tokens=16, stream=True, **GREEDY
                )
                return "".join([chunk.choices[0].text async for chunk in stream])

            return await asyncio.gather(*map(one, prompts))

    alone = [
        client.completions.create(prompt=prompt, max_tokens=16, **GREEDY).choices[0].text
        for prompt in prompts
    ]
    assert asyncio.run(ask()) == alone


def test_a_text_and_its_tokens(live: Live) -> None:
    text = "naïve 🌲 <|im_end|>"
    found = live.ask("POST", "/tokenize", {"prompt": text, "return_token_strs": True}).json
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
    assert found["max_model_len"] == 256
    back = live.ask("POST", "/detokenize", {"tokens": found["tokens"]}).json
    assert back == {"prompt": text}
    chat = live.ask("POST", "/tokenize", {"messages": MESSAGES, "model": MODEL}).json
    shown = live.ask("POST", "/detokenize", {"tokens": chat["tokens"]}).json["prompt"]
    assert shown.endswith("<|im_start|>assistant\n")


def test_health_and_version(live: Live) -> None:
    assert live.ask("GET", "/health").json == {"status": "ok"}
    assert live.ask("HEAD", "/health").status == 200
    assert live.ask("GET", "/version").json["version"]
    assert "/v1/chat/completions" in live.ask("GET", "/openapi.json").json["paths"]
