#!/usr/bin/env python3
"""Build the image of a training job: the front door of launch/cloud/build_image.py."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from launch.cloud.build_image import build_docker_image, main
from lib.core import stage

__all__ = ["build_docker_image"]

if __name__ == "__main__":
    stage.run_main(main)
