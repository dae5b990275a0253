"""The script that measures a step without a model runs, and prints what it says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "step_overhead.py"


def test_a_line_per_case_and_variant() -> None:
    options = [
        "--cases",
        "4,3+20",
        "--steps",
        "25",
        "--engines",
        "trivet",
        "--variants",
        "steady,evicting,hybrid,stuck",
    ]
    ran = subprocess.run([sys.executable, str(SCRIPT), *options], capture_output=True, text=True, check=True)
    lines = [json.loads(line) for line in ran.stdout.splitlines()]
    assert [(line["running"], line["waiting"], line.get("variant")) for line in lines] == [
        (running, waiting, variant)
        for variant in (None, "evicting", "hybrid", "stuck")
        for running, waiting in ((4, 0), (3, 20))
    ]
    for line in lines:
        assert line["engine"] == "trivet"
        assert line["us_per_step"] > 0
        # Both figures are rounded.
        assert abs(line["us_per_request_step"] * line["running"] - line["us_per_step"]) < 0.2
