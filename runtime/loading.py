"""Python files of the user's as modules: models and targets that are named by path."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

from autopar.errors import InputError


def load_file(path: Path) -> ModuleType:
    """The module of a Python file, run once in this process; it may import its neighbours.

    Raises InputError for what is no such file; what the code of the file raises passes through.
    """
    path = path.resolve()
    if not path.is_file():
        raise InputError(f"{path} does not exist", why="no such file", fix="check the path")
    name = f"autopar_file_{re.sub(r'[^0-9A-Za-z]', '_', str(path))}"
    if name in sys.modules:
        return sys.modules[name]
    if str(path.parent) not in sys.path:  # as `python path/to/file.py` would have it
        sys.path.append(str(path.parent))
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise InputError(f"{path} is not a Python file", why="its name does not end in .py", fix="name a .py file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
