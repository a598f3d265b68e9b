"""What clients may ask: OpenAI's fields, vLLM's, and ours. Any other is refused by name.

Types are strict: a number in a string is no number. `None` always means "not given".
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

_Count = Annotated[int, Field(ge=1)]
_Id = Annotated[int, Field(ge=0)]
_Penalty = Annotated[float, Field(ge=-2, le=2)]
_Seed = Annotated[int, Field(ge=-(2**63), lt=2**64)]
_Texts = str | Annotated[list[str], Field(max_length=64)]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class _Loose(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class StreamOptions(_Strict):
    """`include_usage` adds a last chunk with counts; `continuous_usage_stats` puts them in all."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class Sampling(_Strict):
    """What chat and text completions share."""

    model: str | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: _Seed | None = None
    stop: _Texts | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    user: str | None = None
    # vLLM's
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    min_tokens: _Id | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[_Id] | None = None
    bad_words: list[str] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    cache_salt: Annotated[str, Field(min_length=1)] | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    structured_outputs: dict[str, Any] | None = None
    # Draftwood's
    timeout: Annotated[float, Field(gt=0)] | None = None
    speculation: bool | None = None
    max_tree_nodes: _Id | None = None
    max_draft_depth: _Id | None = None
    rounds: bool | None = None


class ContentPart(_Loose):
    """A part of a message; only text can be served."""

    type: str
    text: str | None = None


class FunctionCall(_Loose):
    """A call that the assistant made: the arguments are JSON in a string."""

    name: str
    arguments: str = "{}"


class ToolCall(_Loose):
    """The same, with its id."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(_Loose):
    """One turn of a conversation. Further fields are ignored, as clients send answers back."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None


class Function(_Loose):
    """A function the model may call."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.\-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(_Loose):
    """A tool: always a function."""

    type: Literal["function"]
    function: Function


class NamedFunction(_Loose):
    """Which function, by its name."""

    name: str


class NamedTool(_Loose):
    """`tool_choice` when one function must be called."""

    type: Literal["function"]
    function: NamedFunction


class JsonSchema(_Loose):
    """A schema by OpenAI's rules."""

    name: str
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(_Strict):
    """The form that the answer must have."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class ChatRequest(Sampling):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: _Count | None = None
    max_completion_tokens: _Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # OpenAI's that change no text here: accepted and ignored.
    metadata: dict[str, str] | None = None
    modalities: list[Literal["text"]] | None = None
    prediction: dict[str, Any] | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    store: bool | None = None


class CompletionRequest(Sampling):
    """Body of POST /v1/completions."""

    prompt: (
        str
        | Annotated[list[str], Field(min_length=1)]
        | Annotated[list[_Id], Field(min_length=1)]
        | Annotated[list[Annotated[list[_Id], Field(min_length=1)]], Field(min_length=1)]
    )
    max_tokens: _Id | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    best_of: _Count | None = None
    suffix: str | None = None


class TokenizeRequest(_Strict):
    """Body of POST /tokenize: a text, or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[Tool] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(_Strict):
    """Body of POST /detokenize."""

    model: str | None = None
    tokens: list[_Id]
