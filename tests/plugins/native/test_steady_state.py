"""Decoding takes no more memory the longer it goes on."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from pathlib import Path

import pytest
from native_kit import VOCAB, make_model, save

ROWS, HIDDEN = 8, 512
PROGRAM = f"""
import ctypes, json, sys
from trivet.engine import Engine
from trivet.testing.fakes import FakeTokenizer
from trivet_schemas.sampling import SamplingParams

class Heap(ctypes.Structure):  # mallinfo2(3)
    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")]

libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Heap

def in_use():
    heap = libc.mallinfo2()
    return heap.uordblks + heap.hblkhd  # blocks of the heap, and blocks that are mappings of their own

settings = {{"model": sys.argv[1], "dtype": "float32", "device": "cpu", "max_model_len": 2048, "max_num_seqs": {ROWS},
             "plugins": {{"cache": {{"memory": "64MiB"}}}}}}
engine = Engine(settings, [FakeTokenizer()])
for row in range({ROWS}):
    prompt = [3 + (row + i) % {VOCAB - 3} for i in range(20)]
    params = SamplingParams(max_tokens=2000, temperature=0.0, ignore_eos=True, detokenize=False)
    engine.add_request(str(row), prompt, params)
warm, measured = map(int, sys.argv[2:4])
for _ in range(warm):
    engine.step()
before = in_use()
for _ in range(measured):
    engine.step()
print(json.dumps((in_use() - before) / measured))
engine.shutdown()
"""
GLIBC = sys.platform == "linux" and hasattr(ctypes.CDLL(None), "mallinfo2")
#: steps that an engine remembers, and some more
REMEMBERED = 1100


@pytest.mark.skipif(not GLIBC, reason="another C library than glibc")
def test_a_step_of_decoding_keeps_nothing(tmp_path: Path) -> None:
    """On average over 200 steps of 8 requests: an activation of such a step would be 16 KiB, of one request 2 KiB."""
    model = make_model("qwen2", hidden_size=HIDDEN, num_hidden_layers=2, max_position_embeddings=2048)
    command = [sys.executable, "-c", PROGRAM, save(model, tmp_path / "model"), str(REMEMBERED), "200"]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout) < 1024
