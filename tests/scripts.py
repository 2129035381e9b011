"""Import scripts whose names are not identifiers, such as the stages."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from tests.conftest import ROOT


def load_script(path: str | Path) -> ModuleType:
    """Import a script anew. path: from the root of the repository, or absolute."""
    path = ROOT / path
    spec = importlib.util.spec_from_file_location(f"script_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look the module up while they are defined
    spec.loader.exec_module(module)
    return module
