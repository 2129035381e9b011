#!/usr/bin/env python3
"""Train on Kubernetes: the front door of launch/cloud/kubernetes.py, which --help describes.

from launch.kubernetes import build_docker_image, deploy_training_job, manage_eks_cluster
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from launch.cloud.build_image import build_docker_image
from launch.cloud.kube.cluster import manage_eks_cluster
from launch.cloud.kubernetes import deploy_training_job, main
from lib.core import stage

__all__ = ["build_docker_image", "deploy_training_job", "manage_eks_cluster"]

if __name__ == "__main__":
    stage.run_main(main, only_shows=sys.argv[1:2] in (["logs"], ["status"]))
