"""8 and 4 bits: made from folders and GGUF files, chosen by size, refused with a reason, good."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers as tf

from draftwood.errors import ConfigError, ModelError
from draftwood.llm import LLM
from draftwood.models import load, sources
from draftwood.models.formats import Bits, file_name
from draftwood.models.known_quality import KnownQuality, quality_of, remember
from draftwood.models.load import Placement, choose_form
from draftwood.models.quantised_convert import count_parameters, why_not_quantised
from draftwood.sampling import SamplingParams
from tests.models.test_exact import CONFIGS, make_module
from tests.tiny import save_tiny

CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model folder whose sizes the 8-bit decoder takes, and an empty cache."""
    monkeypatch.setenv("DRAFTWOOD_CACHE", str(tmp_path / "cache"))
    save_tiny(tmp_path / "model", "llama")  # for its tokenizer
    module = make_module("llama")
    config = module.config
    config.vocab_size = 2048
    module = tf.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    module.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3", "mistral", "phi3", "gpt2"])
def test_parameters_are_counted_as_the_module_has_them(arch: str) -> None:
    """The choice of 8 bits goes by this count; norms and biases do not matter."""
    module = make_module(arch)
    count = count_parameters(module.config)
    if arch in ("phi3", "gpt2"):
        assert count == 0
    else:
        assert count == sum(p.numel() for p in module.parameters() if p.dim() == 2)


@pytest.mark.parametrize("bits", ["int8", "int4"])
def test_a_folder_is_quantised_once(folder: Path, bits: Bits) -> None:
    first = sources.resolve(str(folder), form=bits)
    assert first.quantised is not None
    made = (first.quantised / file_name(bits)).stat().st_mtime_ns
    again = sources.resolve(str(folder), form=bits)
    assert again == first
    assert (first.quantised / file_name(bits)).stat().st_mtime_ns == made
    llm = LLM(str(folder), quantization=bits)
    assert llm.model.spec.quantization == bits
    plain = llm.generate([5, 6, 7], SamplingParams(max_tokens=20, speculation=False))[0]
    assert llm.generate([5, 6, 7], SamplingParams(max_tokens=20))[0].token_ids == plain.token_ids


def test_changed_weights_get_8_bits_anew(folder: Path) -> None:
    first = sources.resolve(str(folder), form="int8").quantised
    make_module("llama").save_pretrained(folder)
    assert sources.resolve(str(folder), form="int8").quantised != first


def test_large_models_on_a_cpu_run_in_8_bits(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_form(str(folder), Placement(CPU), None).form == "float32"
    monkeypatch.setattr(load, "INT8_FROM_PARAMETERS", 1000)
    choice = choose_form(str(folder), Placement(CPU), None)
    assert choice.form == "int8"
    assert "parameters on a CPU" in choice.reason
    assert choose_form(str(folder), Placement(CPU, quantization="none"), None).form == "float32"
    bfloat16 = Placement(CPU, torch.bfloat16)
    assert choose_form(str(folder), bfloat16, None).form == "float32"


def test_draft_models_on_a_cpu_take_the_fastest_form(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Below 300 M parameters 8 bits: 4 cost SmolLM2 two choices in five."""
    draft = Placement(CPU, draft=True)
    assert choose_form(str(folder), draft, None).form == "int8"
    monkeypatch.setattr(load, "INT4_FROM_PARAMETERS", 1000)
    assert choose_form(str(folder), draft, None).form == "int4"
    asked = Placement(CPU, quantization="none", draft=True)
    assert choose_form(str(folder), asked, None).form == "float32"


def test_what_cannot_be_had_says_why(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="quantization is 'int2': use int8, int4, none"):
        LLM(str(folder), quantization="int2")
    with pytest.raises(ConfigError, match="it is for CPUs"):
        choose_form(str(folder), Placement(torch.device("cuda"), quantization="int8"), None)
    monkeypatch.setattr("draftwood.kernels.build.why_unavailable", lambda: "there is no compiler")
    with pytest.raises(ConfigError, match="int8 cannot be had: there is no compiler"):
        LLM(str(folder), quantization="int8")
    choice = choose_form(str(folder), Placement(CPU), None)
    assert (choice.form, choice.reason) == ("float32", "there is no compiler")


def test_shapes_the_decoder_does_not_take_are_named() -> None:
    assert why_not_quantised(CONFIGS["llama"]) is None
    assert "gpt2" in str(why_not_quantised(CONFIGS["gpt2"]))
    assert "gelu" in str(why_not_quantised(tf.LlamaConfig(hidden_act="gelu")))
    assert "sizes" in str(why_not_quantised(tf.LlamaConfig(hidden_size=72, num_attention_heads=4)))
    scaled = tf.LlamaConfig(
        rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    )
    assert "dynamic" in str(why_not_quantised(scaled))
    mixed = tf.Qwen2Config(use_sliding_window=True, sliding_window=8, max_window_layers=1)
    assert "windows" in str(why_not_quantised(mixed))


def test_a_damaged_file_is_named(folder: Path) -> None:
    files = sources.resolve(str(folder), form="int8")
    assert files.quantised is not None
    path = files.quantised / file_name("int8")
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ModelError, match="damaged: delete its folder"):
        LLM(str(folder), quantization="int8")


@pytest.mark.real_model
def test_8_bits_pass_the_quality_bar() -> None:
    """Perplexity within 1.5 % of float32 and a mean divergence of at most 0.02 nats."""
    check_quality("smollm2-135m")


@pytest.mark.large_models
@pytest.mark.parametrize("name", ["qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b"])
def test_8_bits_pass_the_quality_bar_on_larger_models(name: str) -> None:
    """They take gigabytes and minutes, so they are run when they are asked for."""
    check_quality(name)


def check_quality(name: str) -> None:
    from draftwood.bench import quality

    tested, _, _ = load.load_model(name, Placement(CPU, quantization="int8"))
    reference, files, _ = load.load_model(name, Placement(CPU, quantization="none"))
    from draftwood.text import Tokenizer

    named = quality.texts([], 20)
    results = quality.compare(tested, reference, Tokenizer.load(files.path), named, 500)
    assert len(results) >= 2
    for result in results:
        assert abs(result.perplexity_change) < 0.015, result
        assert 0 < result.divergence < 0.02, result


def test_what_is_known_of_a_form_is_said_or_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    monkeypatch.setenv("DRAFTWOOD_CACHE", str(tmp_path / "cache"))
    spec = LLM(str(folder), quantization="int8").model.spec
    assert quality_of(spec) is None
    packaged = replace(spec, name="qwen2.5-coder-1.5b", fingerprint="another")
    assert quality_of(packaged) == KnownQuality(0.0026, -0.0018)
    assert quality_of(replace(packaged, quantization="none")) is None
    remember(spec, KnownQuality(0.5, 0.1))
    assert quality_of(spec) == KnownQuality(0.5, 0.1)
    assert quality_of(packaged) == KnownQuality(0.0026, -0.0018)
