import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest


@pytest.fixture(scope="session")
def blocks():
    """The small blocks of blocks.py."""
    return SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("blocks.py"))))
