"""Beam search on real architectures against transformers' ``generate``.

Both do the same while no end of sequence occurs. Where one does, transformers counts it only among the ``num_beams``
best candidates of a step and divides by the generated length; Trivet, like vLLM, counts every end among the candidates
of a beam and divides by the whole length.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kit import CONTEXT, settings
from transformers import AutoModelForCausalLM

from trivet import LLM, BeamSearchParams
from trivet.testing.fakes import FakeTokenizer

PROMPTS = [[5, 6, 7, 8], [11] * 17, [3, 70, 41, 7, 22, 60, 13, 2, 33]]
NEW = 12


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@pytest.mark.parametrize("width", [2, 5])
def test_beams_without_an_end_are_those_of_transformers(library: Any, family: str, width: int) -> None:
    path = library.path(family)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    given = settings(path, family, block_size=8, budget=32, small=False)
    with LLM.from_config(given, [FakeTokenizer()]) as llm:
        outputs = llm.beam_search(PROMPTS, BeamSearchParams(beam_width=width, max_tokens=NEW))
    assert len(PROMPTS[1]) + NEW < CONTEXT
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            expected = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                num_beams=width,
                num_return_sequences=width,
                max_new_tokens=NEW,
                do_sample=False,
                return_dict_in_generate=True,
                output_scores=True,
                pad_token_id=0,
            )
        assert [s.tokens for s in output.sequences] == expected.sequences.tolist()
        totals = [s.cum_logprob for s in output.sequences]
        assert totals == pytest.approx((expected.sequences_scores * NEW).tolist(), abs=1e-3)
