"""Things other than files in the folder on disk: misses, never an error, and never a process that waits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from offload_kit import Rig, make_layout, options

from trivet.errors import TrivetError
from trivet_offload.segments import SegmentPlan, SegmentStore, segment_path

LAYOUT = make_layout()
KEYS = [bytes([i]) * 33 for i in range(6)]
PLACES = ("fifo", "folder", "dangling link", "link to a file", "socket-like device")


def run(path: Path) -> tuple[int, list[bool]]:
    """A life of the tier: how many of the keys it found, and whether those loaded well."""
    rig = Rig(LAYOUT, options(2, LAYOUT, disk=6, path=path))
    try:
        found = [key for key in KEYS if rig.tier.holds(key)]
        loaded = [rig.load((0, 30, key))[0] for key in found]
        for i, key in enumerate(KEYS):
            rig.store((0, 1 + i, key))
        return len(found), loaded
    finally:
        rig.end()


def replace(file: Path, what: str) -> None:
    file.unlink()
    if what == "fifo":
        os.mkfifo(file)
    elif what == "folder":
        file.mkdir()
        (file / "content").write_text("x", encoding="utf-8")
    elif what == "dangling link":
        file.symlink_to(file.parent / "nowhere")
    elif what == "link to a file":
        (file.parent / "precious").write_text("precious", encoding="utf-8")
        file.symlink_to("precious")
    else:
        file.symlink_to("/dev/zero")


@pytest.mark.parametrize("what", PLACES)
@pytest.mark.parametrize("pattern", ["rank0/segment-*.kv", "generation", "about.json"])
def test_what_is_no_file_is_a_miss(tmp_path: Path, what: str, pattern: str) -> None:
    assert run(tmp_path) == (0, [])
    found, loaded = run(tmp_path)
    assert found == len(KEYS)
    assert all(loaded)
    (home,) = tmp_path.iterdir()
    (home / "generation").touch()
    files = list(home.glob(pattern))
    assert files
    for file in files:
        replace(file, what)
    found, loaded = run(tmp_path)
    assert all(loaded)
    if pattern != "about.json":
        assert found == 0
    # What could not be replaced stays out of use; everything else works again.
    found, loaded = run(tmp_path)
    assert all(loaded)
    if what != "folder" and pattern != "generation":
        assert found == len(KEYS)
    precious = home.rglob("precious")
    assert all(file.read_text(encoding="utf-8") == "precious" for file in precious)
    assert not list(home.rglob("nowhere")), "nothing is written through a link"


@pytest.mark.parametrize("text", ["", "x", "-1", "1.5", str(2**31), str(2**32), str(2**70), "9" * 5000])
def test_a_number_of_resets_that_is_none(tmp_path: Path, text: str) -> None:
    run(tmp_path)
    (home,) = tmp_path.iterdir()
    (home / "generation").write_text(text, encoding="utf-8")
    found, _ = run(tmp_path)
    assert found == 0, "content that may be from before a reset is not used"
    rig = Rig(LAYOUT, options(2, LAYOUT, disk=6, path=tmp_path))
    rig.tier.reset()
    rig.end()
    run(tmp_path)
    found, loaded = run(tmp_path)
    assert found == len(KEYS)
    assert all(loaded)


def test_a_lock_that_is_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "lock")
    with pytest.raises(TrivetError, match=r"offload\.path: 'kv' cannot be used \(.*no regular file"):
        SegmentStore(tmp_path, SegmentPlan.of(64, 1 << 16), b"x" * 32, "kv")


_CRASH = """
import os, sys
import numpy as np
from pathlib import Path
from trivet_offload.segments import SegmentPlan, SegmentStore
store = SegmentStore(Path(sys.argv[1]), SegmentPlan.of(64, 1 << 16), b"x" * 32, "kv")
for i in range(10_000):
    store.write(i % 100, 0, b"key%d" % (i % 100), np.full(64, i % 100, np.uint8))
    if i == 777:
        os.kill(os.getpid(), 9)
"""


def test_a_process_that_is_killed_leaves_the_folder_to_the_next(tmp_path: Path) -> None:
    import numpy as np

    ended = subprocess.run([sys.executable, "-c", _CRASH, str(tmp_path)], check=False)
    assert ended.returncode == -9
    store = SegmentStore(tmp_path, SegmentPlan.of(64, 1 << 16), b"x" * 32, "kv")
    content = np.zeros(64, np.uint8)
    for place in range(100):
        assert store.read(place, 0, b"key%d" % place, content)
        assert (content == place).all()
    store.close()
    assert segment_path(tmp_path, 0).is_file()
