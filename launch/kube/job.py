"""Decides all of a training job, and fills in the manifests that say so.

In launch/kube/templates/, `${NAME}` stands for a setting: alone and without quotes it
keeps its type (a number, a list), and a list in a list is spread. `!if-NAME` before a value leaves
the whole entry out when that setting is empty or 0. A name that is not a setting is an error.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from launch.kube.job_options import TEMPLATES, JobOptions
from launch.kube.kinds import HYPERPOD_PREFIX, KINDS
from lib.core import units
from lib.core.errors import Problems, UsageError, visible
from lib.train import command_line
from lib.train.config import Config

# What is not the node network: loopback, containers, and the interfaces that EKS gives to pods.
NOT_THE_NETWORK = "^lo,docker,veth,eni,pod-id-link0"
# What a line about a step looks like, by stage 04's --log-style.
_STEP_PATTERNS = {"dict": ".*'global_step': \\d+", "line": ".*step +[0-9,]+/[0-9,]+ +loss"}
_NAME = re.compile(r"\$\{(\w+)\}")
_LEFT_OUT = object()
_EXPANDED = ("command", "args")  # lists of words in which Kubernetes replaces $(NAME)

Document = dict[str, Any]


@dataclass(frozen=True)
class Job(JobOptions):
    """Holds options that are settled, and what follows from them.

    train: options of stage 04. env: what NCCL needs on these nodes. interfaces: for
    NCCL_SOCKET_IFNAME, empty to let NCCL choose. launched_as: the command that a person typed, for
    the messages of the run.
    """

    train: tuple[str, ...] = field(kw_only=True)
    env: dict[str, str] = field(default_factory=dict, kw_only=True)
    huge_pages: bool = field(default=True, kw_only=True)
    interfaces: str = field(default=NOT_THE_NETWORK, kw_only=True)
    launched_as: str = field(default="", kw_only=True)

    def manifests(self) -> list[Document]:
        """Return the job as Kubernetes takes it; ${POD} in its template is the pod of pod.yaml."""
        settings = self._settings()
        [pod] = filled("pod.yaml", settings)
        return keep_dollars(filled(f"{self.kind}.yaml", {**settings, "POD": pod}))

    def _settings(self) -> dict[str, Any]:
        kind = KINDS[self.kind]
        asked = command_line.parse_options(self.train)
        return {
            **{name.upper(): value for name, value in vars(self).items()},
            "RUNTIME": self.runtime,
            "CONTAINER": kind.container,
            "PORT_NAME": kind.port[0],
            "PORT": kind.port[1],
            "NUM_NODES": self.nodes,
            "LEAST_NODES": self.min_nodes or self.nodes,
            "HEALTH": kind.on_hyperpod or self.instance_type.startswith(HYPERPOD_PREFIX),
            "GPU_PER_NODE": self.gpus_per_node,
            "PROC_PER_NODE": self.gpus_per_node or 1,
            "HUGE_PAGES": self.huge_pages and self.efa_per_node,
            "IMAGE_URI": self.image,
            "PULL_SECRET": self.image_pull_secret,
            "PROJECT_DIR": self.project_dir or self.mount_path,
            "POD_RESTARTS": self.max_restarts * self.nodes,
            "POD_RESTART": kind.pod_restart,
            "STEP_PATTERN": _STEP_PATTERNS[asked.log_style],
            # Pods that come back tell by it that they have overwritten the run already.
            "LAUNCH_MARK": f"{self.job_name} {time.time_ns():x}"
            if asked.overwrite or asked.resume == "never"
            else "",
            "MORE_ENV": [{"name": key, "value": value} for key, value in self.env.items()],
            "TRAIN": list(self.train),
        }


def planned(asked: JobOptions, given: Sequence[str], launched_as: str = "") -> Job:
    """Return the job that is asked for; UsageError tells all that is wrong with it.

    given: options of stage 04.
    """
    problems = Problems()
    asked.check(problems)
    settled = asked.settled()
    train = problems.collect(lambda: train_options(asked, given))
    if train and (asked.node or asked.gpus_per_node is not None):
        parsed = command_line.parse_options(train)
        per_node = settled.gpus_per_node or 1
        problems.collect(lambda: _check_division(asked, parsed, per_node))
    problems.raise_if_any()
    return Job(
        **vars(settled),
        train=tuple(train or ()),
        launched_as=launched_as,
        env={str(key): str(value) for key, value in asked.node.get("env", {}).items()},
    )


def train_options(asked: JobOptions, given: Sequence[str]) -> list[str]:
    """Return the options of stage 04 as the pods get them; UsageError when it would not take them.

    What --config holds stands among them: pods do not have the file. The job's name becomes the
    experiment's when there is none, and a rule for slow jobs has the log style that it reads.
    """
    words = command_line.expand_config(command_line.add_recipe(given))
    if asked.slow_below:
        words.insert(0, "--log-style=dict")
    if asked.gpus_per_node == 0:  # the node may have some, and the pod gets none
        words.insert(0, "--device=cpu")
    parsed = command_line.parse_options(words)
    if asked.slow_below and parsed.log_style != "dict":
        raise UsageError(
            "--slow-below reads the speed from --log-style dict",
            found=f"--log-style {parsed.log_style}",
            expected="no --log-style, or dict",
        )
    if not parsed.dataset_name:
        raise UsageError("no dataset is named", expected="-d NAME behind `--`")
    return words if parsed.experiment_name else [f"--experiment-name={asked.job_name}", *words]


def _check_division(asked: JobOptions, train: Config, per_node: int) -> None:
    """Raise UsageError where the ranks cannot share the work, on all nodes or on fewer.

    train: options of stage 04. per_node: ranks.
    """
    from lib.train import plan

    command_line.require_divisible(train, asked.nodes * per_node)
    division = plan.divide(train, 0, asked.nodes * per_node)
    batch = division.global_batch
    share = division.micro_batch * per_node
    numbers = range(asked.min_nodes or asked.nodes, asked.nodes + 1)
    if unfit := [nodes for nodes in numbers if batch % (nodes * share)]:
        least = math.lcm(*(nodes * share for nodes in numbers))
        raise UsageError(
            f"--min-nodes {asked.min_nodes}: {units.counted(batch, 'sample')} per "
            f"step cannot be divided among the ranks of "
            f"{' or '.join(map(str, unfit))} {'nodes' if unfit[-1] > 1 else 'node'}",
            expected=f"--global-batch-size, a multiple of {least}, or no --min-nodes",
        )


def text(found: list[Document], headline: str) -> str:
    """Return manifests as they are applied; UsageError where a value is not text.

    headline: a comment that says where they are from. Control characters, which YAML does not take
    in comments, are spelled out in it.
    """
    comment = "".join(f"# {visible(line)}\n" for line in headline.splitlines())
    return comment + yaml.dump_all(
        found, Dumper=_ManifestDumper, sort_keys=False, width=math.inf, allow_unicode=True
    )


class _ManifestDumper(yaml.SafeDumper):
    """Quotes every text but the keys: kubectl reads more words as numbers (2e-5, 0o17) and truth
    values (on, y) than Python's YAML does.
    """

    def represent_mapping(
        self, tag: str, mapping: Any, flow_style: bool | None = None
    ) -> yaml.MappingNode:
        node = super().represent_mapping(tag, mapping, flow_style)
        for key, _ in node.value:
            key.style = None
        return node

    def ignore_aliases(self, data: Any) -> bool:
        """Write a value that stands in two places twice, as a person would."""
        return True


def _quoted(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UsageError(
            f"{text!r} cannot stand in a manifest", expected="UTF-8, which YAML files consist of"
        ) from None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"')


_ManifestDumper.add_representer(str, _quoted)


def filled(template: str, settings: dict[str, Any]) -> list[Document]:
    """Return the documents of a template with its names filled in."""
    path = TEMPLATES / template

    def setting(name: str) -> Any:
        if name not in settings:
            raise UsageError(
                f"{path} names {name}, which is not a setting",
                expected=f"one of {', '.join(sorted(settings))}",
            )
        return settings[name]

    def scalar(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> Any:
        if node.style is None and (alone := _NAME.fullmatch(node.value)):
            return setting(alone[1])
        return _NAME.sub(lambda found: str(setting(found[1])), node.value)

    def conditional(loader: yaml.SafeLoader, name: str, node: yaml.Node) -> Any:
        if not setting(name):
            return _LEFT_OUT
        if isinstance(node, yaml.MappingNode):
            return loader.construct_mapping(node, deep=True)
        if isinstance(node, yaml.SequenceNode):
            return loader.construct_sequence(node, deep=True)
        assert isinstance(node, yaml.ScalarNode)  # there is no other
        is_text = node.style or _NAME.search(node.value)
        return scalar(loader, node) if is_text else yaml.safe_load(node.value)

    class TemplateLoader(yaml.SafeLoader):
        """Has constructors of its own."""

    TemplateLoader.add_constructor("tag:yaml.org,2002:str", scalar)
    TemplateLoader.add_multi_constructor("!if-", conditional)
    with path.open(encoding="utf-8") as file:
        return [_pruned(document) for document in yaml.load_all(file, TemplateLoader)]


def keep_dollars(value: Any) -> Any:
    """Return a manifest, or a part of one, whose containers get each word exactly as typed.

    Kubernetes replaces $(NAME) in command, args and env, and $$ by $; options and paths may hold
    either, perhaps from a file of somebody else.
    """
    if isinstance(value, list):
        return [keep_dollars(item) for item in value]
    if not isinstance(value, dict):
        return value
    value = {key: keep_dollars(item) for key, item in value.items()}
    for key in _EXPANDED:
        if key in value and isinstance(value[key], list):
            value[key] = [_literal(word) for word in value[key]]
    if isinstance(value.get("env"), list):
        value["env"] = [
            {**variable, "value": _literal(variable["value"])} if "value" in variable else variable
            for variable in value["env"]
        ]
    return value


def _literal(word: Any) -> Any:
    return word.replace("$", "$$") if isinstance(word, str) else word


def _pruned(value: Any) -> Any:
    """Return a value without the entries that are left out, and with lists in lists spread."""
    if isinstance(value, dict):
        return {key: _pruned(item) for key, item in value.items() if item is not _LEFT_OUT}
    if not isinstance(value, list):
        return value
    pruned: list[Any] = []
    for item in value:
        if isinstance(item, list):
            pruned += item
        elif item is not _LEFT_OUT:
            pruned.append(_pruned(item))
    return pruned
