"""Fixtures that several folders of tests share."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import HealthCheck, settings
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

# Neither a slow machine nor chance decides: no deadline, and the same examples every time.
settings.register_profile(
    "toque", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("toque")

TINY_CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 259,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The real SmolLM2-135M file of the catalogue, fetched once and checked by its hash."""
    from toque.files.fetch import locate

    return locate("smollm2").path


CHAT_TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


@pytest.fixture(scope="session")
def tiny_config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with config and tokenizer of a model that computes in microseconds, for load_format
    dummy: ids 0, 1, 2 are control tokens, 3 .. 258 the bytes."""
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "config.json").write_text(json.dumps(TINY_CONFIG))
    vocab = {"<pad>": 0, "<s>": 1, "</s>": 2}
    vocab |= {char: 3 + i for i, char in enumerate(sorted(ByteLevel.alphabet()))}
    tokenizer = tokenizers.Tokenizer(BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<pad>", "<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "</s>", "chat_template": CHAT_TEMPLATE})
    )
    return folder
