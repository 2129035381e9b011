"""Loaded by every Python process of a launch: the network guard, and the fault in FAULT."""

import json
import os
import runpy
import sys
from pathlib import Path

_TESTS = Path(__file__).resolve().parent.parent
runpy.run_path(str(_TESTS / "network_guard" / "sitecustomize.py"))
if "FAULT" in os.environ:
    sys.path.append(str(_TESTS.parent))
    from tests.fault_points import Fault

    Fault(**json.loads(os.environ["FAULT"])).install()
