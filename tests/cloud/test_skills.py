# covers: launch/skills/*
"""What the skills and commands for coding agents contain can be run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from launch import kubernetes
from tests.cloud.kube_server import Cluster
from tests.cloud.test_deployer import ECR, eks, image_docker  # noqa: F401 (a fixture)
from tests.conftest import ROOT

SKILLS = sorted((ROOT / "launch" / "skills").iterdir())
NAMES = [path.name for path in SKILLS]


def read_front_matter(path: Path) -> tuple[dict[str, str], str]:
    """Return the front matter of a file for agents, and its text."""
    _, front, text = path.read_text(encoding="utf-8").split("---\n", 2)
    return yaml.safe_load(front), text


def find_blocks(text: str, language: str) -> list[str]:
    """Return the blocks of code with the places that a person fills in filled in."""
    filled = text.replace("REGISTRY", ECR).replace("CLUSTER", "c").replace("REGION", "us-west-2")
    return re.findall(rf"^```{language}\n(.*?)^```$", filled, re.MULTILINE | re.DOTALL)


def name_function(skill: Path) -> str:
    return skill.name.replace("-", "_")


@pytest.mark.parametrize("skill", SKILLS, ids=NAMES)
def test_a_skill_has_the_form_that_agents_read(skill: Path) -> None:
    front, text = read_front_matter(skill / "SKILL.md")
    assert front["name"] == skill.name and 40 < len(front["description"]) <= 1024
    assert name_function(skill) in kubernetes.__all__ and f"{name_function(skill)}(" in text
    command, body = read_front_matter(skill / f"{name_function(skill)}.md")
    assert command["description"] and f"{name_function(skill)}($ARGUMENTS)" in body
    assert sorted(map(name_function, SKILLS)) == sorted(kubernetes.__all__)


@pytest.mark.parametrize("skill", SKILLS, ids=NAMES)
def test_the_calls_of_a_skill_run(skill: Path, eks: Cluster) -> None:  # noqa: F811
    image_docker.record_built_image(image_docker.BuiltImage(f"{ECR}/fsdp:1", is_pushed=True))
    command, body = read_front_matter(skill / f"{name_function(skill)}.md")
    [script] = find_blocks(body, "bash")
    hint = command["argument-hint"].replace("REGISTRY", ECR).replace("CLUSTER", "c")
    called = re.search(r"<<'END'\n(.*)^END$", script, re.MULTILINE | re.DOTALL)
    assert called
    for code in (*find_blocks(read_front_matter(skill / "SKILL.md")[1], "python"), called[1]):
        exec(code.replace("$ARGUMENTS", hint), {})


@pytest.mark.slow
@pytest.mark.parametrize("skill", SKILLS, ids=NAMES)
def test_the_command_lines_of_a_skill_run(skill: Path, eks: Cluster) -> None:  # noqa: F811
    image_docker.record_built_image(image_docker.BuiltImage(f"{ECR}/fsdp:1", is_pushed=True))
    eks.add("namespaces", {"metadata": {"name": "default"}})
    for script in find_blocks(read_front_matter(skill / "SKILL.md")[1], "bash"):
        here = script.replace("python launch/", f"{sys.executable} {ROOT}/launch/")
        quick = here.replace("kubernetes.py deploy", "kubernetes.py deploy --poll-seconds 0.05")
        subprocess.run(["bash", "-ec", quick], check=True, timeout=120)
