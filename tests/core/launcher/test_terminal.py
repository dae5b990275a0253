"""What a person at a terminal sees: progress, prompts, Ctrl-C."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from launcher_kit import Site, continuation

_GREEDY = {"sampling": {"temperature": 0, "max_tokens": 8}}
_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """Both ends of a pseudo-terminal, and what was shown on it."""

    def __init__(self) -> None:
        self.master, self.slave = pty.openpty()
        self._shown = ""

    @property
    def text(self) -> str:
        """What was shown so far, without control sequences."""
        while select.select([self.master], [], [], 0)[0]:
            try:
                self._shown += os.read(self.master, 65536).decode(errors="replace")
            except OSError:  # Linux says so when the last program has closed it
                break
        return _ESCAPE.sub("", self._shown).replace("\r", "")

    def type(self, text: str) -> None:
        """Press keys."""
        os.write(self.master, text.encode())

    def wait_for(self, text: str, process: subprocess.Popen[str], seconds: float = 60) -> None:
        """Wait until ``text`` is shown."""
        end = time.monotonic() + seconds
        while text not in self.text:
            assert time.monotonic() < end, self.text
            assert process.poll() is None, self.text
            time.sleep(0.01)


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    """Return a terminal."""
    terminal = Terminal()
    yield terminal
    os.close(terminal.master)
    os.close(terminal.slave)


def test_a_batch_shows_its_progress_and_errors_beside_it(site: Site, terminal: Terminal) -> None:
    source = site.write("in.jsonl", *[{"prompt": "Hello"}] * 30, "broken")
    target = site.folder / "out.jsonl"
    with site.start(
        "generate", site.config(generate=_GREEDY), "-i", source, "-o", target, stderr=terminal.slave
    ) as run:
        out, _ = run.communicate()
    assert (run.returncode, out) == (2, "")
    assert "31/31" in terminal.text
    assert "tokens/s" in terminal.text
    assert "error: line 31: not valid JSON" in terminal.text
    assert "31 requests, 240 tokens" in terminal.text


def test_json_output_has_no_progress(site: Site, terminal: Terminal) -> None:
    source = site.write("in.jsonl", *[{"prompt": "Hello"}] * 30)
    arguments = ["generate", site.config(generate=_GREEDY), "-i", source, "--json"]
    with site.start(*arguments, stderr=terminal.slave) as run:
        out, _ = run.communicate()
    assert len(out.splitlines()) == 30
    assert "30/30" not in terminal.text


def test_a_conversation(site: Site, terminal: Terminal) -> None:
    ends = {"stdin": terminal.slave, "stdout": terminal.slave, "stderr": terminal.slave}
    with site.start("chat", site.config(generate=_GREEDY), start_new_session=True, **ends) as process:
        terminal.wait_for(">>> ", process)
        terminal.type("Hello\n")
        terminal.wait_for(continuation("user: Hello.assistant: ", 8), process)
        terminal.type("/reset\n/exit\n")
        assert process.wait(60) == 0
    assert "Ctrl-D leaves" in terminal.text
    assert "Traceback" not in terminal.text


_FIRST_START = """
import sys
from pathlib import Path
from trivet.launcher.errors import set_up_logging
from trivet_kernels.cpu import build

set_up_logging()
build._SOURCES = Path(sys.argv[1])
assert build.library().one() == 1
"""


@pytest.mark.skipif(shutil.which("gcc") is None, reason="there is no C compiler")
def test_the_first_start_says_that_it_compiles_and_the_next_ones_nothing(tmp_path: Path) -> None:
    (tmp_path / "sources").mkdir()
    (tmp_path / "sources" / "one.c").write_text("int one(void) { return 1; }\n")
    said = []
    for _ in range(2):
        environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
        command = [sys.executable, "-c", _FIRST_START, str(tmp_path / "sources")]
        said.append(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stderr)
    begun, ended = said[0].splitlines()
    assert begun.startswith("note: compiling the native CPU kernels for ")
    assert begun.endswith(f"once: they are kept in {tmp_path / 'cache' / 'trivet' / 'kernels'}")
    assert re.fullmatch(r"note: compiled the native CPU kernels for \w+ in [0-9.]+ s", ended)
    assert said[1] == ""
