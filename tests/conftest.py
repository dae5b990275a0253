"""Settings and fixtures that every test shares.

Real models: ``demo_model`` comes with the ``demo`` extra and is part of the default run. Tests that ask for
``qwen_model`` or ``real_model`` run only with ``--models FOLDER``, which holds ``qwen05`` (Qwen2.5 0.5B Instruct) and
``gemma270`` (Gemma 3 270M), each as ``model.gguf`` and as a Hugging Face folder ``hf``.
"""

from __future__ import annotations

import importlib.util
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

# Before anything imports torch or transformers. The test models are tiny, so one thread per process is fastest, and
# its order of summation is the same on every machine; no test may reach a model hub.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

# A shell starts what it puts in the background with interrupts ignored, and tests of interrupts would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes depends on what else the machine does.
if importlib.util.find_spec("hypothesis") is not None:
    from hypothesis import HealthCheck, settings

    settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("untimed")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that names a folder of real models."""
    parser.addoption("--models", type=Path, metavar="FOLDER", help="folder with further real models, such as qwen05/")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests whose models were not given."""
    if config.getoption("--models") is not None:
        return
    needy = [item for item in items if {"qwen_model", "real_model"} & set(getattr(item, "fixturenames", ()))]
    if needy:
        config.hook.pytest_deselected(items=needy)
        items[:] = [item for item in items if item not in needy]


@pytest.fixture(scope="session")
def repository() -> Path:
    """Return the root of the checkout."""
    return Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """Return the GGUF file of Gemma 3 270M (pretrained, sliding window 512)."""
    from trivet.demo import demo_model_path

    return demo_model_path()


@pytest.fixture(scope="session")
def real_model(request: pytest.FixtureRequest) -> Callable[[str], Path]:
    """Return a function: ``real_model("qwen05/hf")`` is that path under the folder that ``--models`` gives."""

    def find(name: str) -> Path:
        path = Path(request.config.getoption("--models")).expanduser() / name
        if not path.exists():
            pytest.fail(f"--models: {path} does not exist")
        return path

    return find


@pytest.fixture(scope="session")
def qwen_model(request: pytest.FixtureRequest) -> Path:
    """Return the GGUF file of Qwen2.5 0.5B Instruct; tests that use it run only with ``--models``."""
    path = Path(request.config.getoption("--models")) / "qwen05" / "model.gguf"
    if not path.is_file():
        pytest.fail(f"--models: {path} does not exist")
    return path
