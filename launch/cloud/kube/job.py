"""Fill in the options of a training job, and render its manifests from the templates.

In launch/cloud/kube/templates/, `${NAME}` stands for a setting. If it is a whole value without
quotes, the setting keeps its type (a number, a list). A list in a list is flattened. `!if-NAME`
before a value omits the entry if that setting is empty or 0. A name that is not a setting is an
error.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from launch.cloud.kube.job_options import TEMPLATES, JobOptions
from launch.cloud.kube.kinds import HYPERPOD_PREFIX, KINDS
from lib.core import units
from lib.core.errors import Problems, UsageError, escape_controls
from lib.train import command_line
from lib.train.config import Config
from lib.train.sources.table import choose_source

# Interfaces that are not the node network: loopback, containers, and those that EKS gives to pods.
NOT_THE_NETWORK = "^lo,docker,veth,eni,pod-id-link0"
# The log line of a step, by stage 04's --log-style.
_STEP_PATTERNS = {"dict": ".*'global_step': \\d+", "line": ".*step +[0-9,]+/[0-9,]+ +loss"}
_SETTING_NAME = re.compile(r"\$\{(\w+)\}")
_OMITTED = object()
_EXPANDED_KEYS = ("command", "args")  # lists of words in which Kubernetes replaces $(NAME)

Document = dict[str, Any]


@dataclass(frozen=True)
class Job(JobOptions):
    """A job with all options filled in.

    train: options of stage 04. env: variables that NCCL needs on these nodes. interfaces: the value
    of NCCL_SOCKET_IFNAME, empty to let NCCL choose. launched_as: the command that was typed, for
    the messages of the run.
    """

    train: tuple[str, ...] = field(kw_only=True)
    env: dict[str, str] = field(default_factory=dict, kw_only=True)
    huge_pages: bool = field(default=True, kw_only=True)
    interfaces: str = field(default=NOT_THE_NETWORK, kw_only=True)
    launched_as: str = field(default="", kw_only=True)

    @property
    def needs_token(self) -> bool:
        """Return whether the pods read from the Hub, so that they need its token."""
        config = command_line.parse_options(self.train)
        return choose_source(config).reads_hub(config)

    def manifests(self) -> list[Document]:
        """Return the manifests of the job; ${POD} in its template is the pod of pod.yaml."""
        settings = self._settings()
        [pod] = fill_template("pod.yaml", settings)
        return escape_dollars(fill_template(f"{self.kind}.yaml", {**settings, "POD": pod}))

    def _settings(self) -> dict[str, Any]:
        kind = KINDS[self.kind]
        config = command_line.parse_options(self.train)
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
            "TOKEN_SECRET": self.token_secret if self.needs_token else "",
            "PROJECT_DIR": self.project_dir or self.mount_path,
            "POD_RESTARTS": self.max_restarts * self.nodes,
            "POD_RESTART": kind.pod_restart,
            "STEP_PATTERN": _STEP_PATTERNS[config.log_style],
            # Pods that come back find this mark in the run and do not overwrite it again.
            "LAUNCH_MARK": f"{self.job_name} {time.time_ns():x}"
            if config.overwrite or config.resume == "never"
            else "",
            "MORE_ENV": [{"name": key, "value": value} for key, value in self.env.items()],
            "TRAIN": list(self.train),
        }


def plan_job(job_options: JobOptions, train_words: Sequence[str], launched_as: str = "") -> Job:
    """Return the job for options. train_words: options of stage 04.

    Raises UsageError with all problems at once.
    """
    problems = Problems()
    job_options.check(problems)
    complete = job_options.with_defaults()
    train = problems.collect(lambda: expand_train_options(job_options, train_words))
    if train and (job_options.node or job_options.gpus_per_node is not None):
        parsed = command_line.parse_options(train)
        per_node = complete.gpus_per_node or 1
        problems.collect(lambda: _check_division(job_options, parsed, per_node))
    problems.raise_if_any()
    return Job(
        **vars(complete),
        train=tuple(train or ()),
        launched_as=launched_as,
        env={str(key): str(value) for key, value in job_options.node.get("env", {}).items()},
    )


def expand_train_options(job_options: JobOptions, train_words: Sequence[str]) -> list[str]:
    """Return the options of stage 04 as the pods get them.

    The options in a --config file are expanded, since pods do not have the file. Without
    --experiment-name, the experiment gets the name of the job. --slow-below adds --log-style dict,
    from which it reads the speed. Raises UsageError for options that stage 04 would refuse.
    """
    words = command_line.expand_config(command_line.add_recipe(train_words))
    if job_options.slow_below:
        words.insert(0, "--log-style=dict")
    if job_options.gpus_per_node == 0:  # the node may have GPUs that the pod does not get
        words.insert(0, "--device=cpu")
    parsed = command_line.parse_options(words)
    if job_options.slow_below and parsed.log_style != "dict":
        raise UsageError(
            "--slow-below reads the speed from --log-style dict",
            found=f"--log-style {parsed.log_style}",
            expected="no --log-style, or dict",
        )
    if not parsed.dataset_name:
        raise UsageError("no dataset is given", expected="-d NAME after `--`")
    words = command_line.drop_overridden(words)
    if parsed.experiment_name:
        return words
    return [f"--experiment-name={job_options.job_name}", *words]


def _check_division(job_options: JobOptions, train: Config, per_node: int) -> None:
    """Raise UsageError if some allowed number of nodes cannot divide the global batch evenly.

    train: options of stage 04. per_node: ranks per node.
    """
    from lib.train import batch_division

    batch_division.require_divisible(train, job_options.nodes * per_node)
    division = batch_division.divide_batch(train, 0, job_options.nodes * per_node)
    batch = division.global_batch
    share = division.micro_batch * per_node
    numbers = range(job_options.min_nodes or job_options.nodes, job_options.nodes + 1)
    if unfit_counts := [nodes for nodes in numbers if batch % (nodes * share)]:
        multiple = math.lcm(*(nodes * share for nodes in numbers))
        raise UsageError(
            f"--min-nodes {job_options.min_nodes}: {units.counted(batch, 'sample')} per "
            f"step cannot be divided among the ranks of "
            f"{' or '.join(map(str, unfit_counts))} {'nodes' if unfit_counts[-1] > 1 else 'node'}",
            expected=f"a --global-batch-size that is a multiple of {multiple}, or no --min-nodes",
        )


def render_manifests(documents: list[Document], headline: str) -> str:
    """Return manifests as YAML. Raises UsageError if a value is not valid UTF-8.

    headline: a comment about their origin. Control characters in it are escaped, since YAML does
    not allow them in comments.
    """
    comment = "".join(f"# {escape_controls(line)}\n" for line in headline.splitlines())
    return comment + yaml.dump_all(
        documents, Dumper=_ManifestDumper, sort_keys=False, width=math.inf, allow_unicode=True
    )


class _ManifestDumper(yaml.SafeDumper):
    """Quotes every text except keys.

    kubectl reads more words as numbers (2e-5, 0o17) and booleans (on, y) than Python's YAML does.
    """

    def represent_mapping(
        self, tag: str, mapping: Any, flow_style: bool | None = None
    ) -> yaml.MappingNode:
        node = super().represent_mapping(tag, mapping, flow_style)
        for key, _ in node.value:
            key.style = None
        return node

    def ignore_aliases(self, data: Any) -> bool:
        """Return True: a value that occurs twice is written twice."""
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UsageError(
            f"{text!r} cannot be part of a manifest", expected="text that is valid in UTF-8"
        ) from None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"')


_ManifestDumper.add_representer(str, _represent_text)


def fill_template(template: str, settings: dict[str, Any]) -> list[Document]:
    """Return the documents of a template with its settings filled in.

    Raises UsageError if the template names an unknown setting.
    """
    path = TEMPLATES / template

    def get_setting(name: str) -> Any:
        if name not in settings:
            raise UsageError(
                f"{path} contains {name}, which is not a setting",
                expected=f"one of {', '.join(sorted(settings))}",
            )
        return settings[name]

    def construct_scalar(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> Any:
        if node.style is None and (only_name := _SETTING_NAME.fullmatch(node.value)):
            return get_setting(only_name[1])
        return _SETTING_NAME.sub(lambda match: str(get_setting(match[1])), node.value)

    def construct_conditional(loader: yaml.SafeLoader, name: str, node: yaml.Node) -> Any:
        if not get_setting(name):
            return _OMITTED
        if isinstance(node, yaml.MappingNode):
            return loader.construct_mapping(node, deep=True)
        if isinstance(node, yaml.SequenceNode):
            return loader.construct_sequence(node, deep=True)
        assert isinstance(node, yaml.ScalarNode)  # YAML has no other kind of node
        is_text = node.style or _SETTING_NAME.search(node.value)
        return construct_scalar(loader, node) if is_text else yaml.safe_load(node.value)

    class TemplateLoader(yaml.SafeLoader):
        """A YAML loader of its own, so that the constructors below stay with this template."""

    TemplateLoader.add_constructor("tag:yaml.org,2002:str", construct_scalar)
    TemplateLoader.add_multi_constructor("!if-", construct_conditional)
    with path.open(encoding="utf-8") as file:
        return [_drop_omitted(document) for document in yaml.load_all(file, TemplateLoader)]


def escape_dollars(value: Any) -> Any:
    """Return a manifest, or a part of one, whose containers get each word exactly as typed.

    In command, args and env, Kubernetes replaces $(NAME) by a variable and $$ by $. Options and
    paths may contain either.
    """
    if isinstance(value, list):
        return [escape_dollars(item) for item in value]
    if not isinstance(value, dict):
        return value
    value = {key: escape_dollars(item) for key, item in value.items()}
    for key in _EXPANDED_KEYS:
        if key in value and isinstance(value[key], list):
            value[key] = [_escape_word(word) for word in value[key]]
    if isinstance(value.get("env"), list):
        value["env"] = [
            {**variable, "value": _escape_word(variable["value"])}
            if "value" in variable
            else variable
            for variable in value["env"]
        ]
    return value


def _escape_word(word: Any) -> Any:
    return word.replace("$", "$$") if isinstance(word, str) else word


def _drop_omitted(value: Any) -> Any:
    """Return a value without omitted entries, and with lists in lists flattened."""
    if isinstance(value, dict):
        return {key: _drop_omitted(item) for key, item in value.items() if item is not _OMITTED}
    if not isinstance(value, list):
        return value
    pruned: list[Any] = []
    for item in value:
        if isinstance(item, list):
            pruned += item
        elif item is not _OMITTED:
            pruned.append(_drop_omitted(item))
    return pruned
