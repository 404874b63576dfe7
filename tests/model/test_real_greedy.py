"""The catalogue's models, through the engine, against transformers on the dequantized weights.

Teacher-forced: the engine's own greedy answer is given to the reference, which must prefer the same
token at every position where its two best are clearly apart, and give it the same probability.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf_oracle import transformers_model
from model_oracle import hf_logits

from toque import LLM, SamplingParams
from toque.files.checkpoint import open_checkpoint

CLEAR_GAP = 0.02  # between the reference's two best logits, in float32
CLEAR_SHARE = 0.9  # of the positions that must be clear for the comparison to mean something
LOGPROB_ERROR = 1e-2  # inputs of the integer kernels have 14 bits; float32 ones come within 1e-4

PROMPTS = [
    "The capital of France is",
    "def fibonacci(n: int) -> int:\n    ",
    "Die Hauptstadt von Frankreich ist",
    "首都是",
]


def compare(path: Path) -> None:
    llm = LLM(str(path), max_num_seqs=8, max_model_len=256, kv_cache_memory_bytes=64 << 20)
    chat = llm.tokenizer.encode_chat([{"role": "user", "content": "Count from one to ten."}])
    sampling = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=1)
    outputs = llm.generate([*PROMPTS, chat], sampling)  # all in one batch
    reference = transformers_model(open_checkpoint(path))
    clear = total = 0
    for output in outputs:
        answer = output.outputs[0]
        start = len(output.prompt_token_ids)
        logits = hf_logits(reference, [*output.prompt_token_ids, *answer.token_ids])
        logits = logits[start - 1 : -1]  # [answer, vocab]: the rows that predict the answer
        best = np.sort(logits, axis=-1)[:, -2:]  # [answer, 2]
        is_clear = best[:, 1] - best[:, 0] > CLEAR_GAP
        chosen = np.array(answer.token_ids)
        assert np.array_equal(chosen[is_clear], logits.argmax(-1)[is_clear])
        expected = torch.log_softmax(torch.from_numpy(logits), -1).numpy()
        got = [logprob.chosen for logprob in answer.logprobs]
        np.testing.assert_allclose(
            got, expected[np.arange(len(chosen)), chosen], atol=LOGPROB_ERROR
        )
        clear, total = clear + int(is_clear.sum()), total + len(chosen)
    assert clear >= CLEAR_SHARE * total


def test_smollm2(smollm2_path: Path) -> None:
    compare(smollm2_path)


@pytest.mark.long
def test_the_default_model() -> None:
    """Qwen2.5-Coder-0.5B: 491 MB, fetched if it is not here."""
    from toque.files.fetch import locate

    compare(locate("qwen2.5-coder-0.5b").path)
