"""Find and check the model and the data that a run starts from, before torch is imported."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lib.checkpoints import commit
from lib.checkpoints.commit import Checkpoint
from lib.core import (
    artifacts,
    declared,
    file_identity,
    hashing,
    log,
    paths,
    units,
)
from lib.core.errors import ArtifactError, Problems, StageError, UsageError
from lib.core.identity import find_differences
from lib.core.paths import Experiment
from lib.hub.dataset import HubDataset
from lib.models import chat_files, directory, lookup, peft_adapter
from lib.models.peft_adapter import PeftAdapter
from lib.parallel.degrees import RECOMPUTATIONS
from lib.runs import state_file
from lib.tokens import mixture, raw_shards
from lib.tokens.chat import policy
from lib.tokens.columns import CHAT
from lib.tokens.dataset import find_dataset
from lib.tokens.mixture import Corpus
from lib.tokens.raw_shards import RawShards
from lib.tokens.synthetic import SyntheticText, find_synthetic
from lib.train import batch_division, checks, plan, previous_run
from lib.train.config import DEFAULTS, Config
from lib.train.plan import Plan
from lib.train.previous_run import KeptTemplate

_FOREIGN = "foreign weights"  # input of --resume-from-foreign of an earlier version
_CHAT_OPTIONS = ("chat_template", "chat_template_kwargs", "train_on", "too_long")


@dataclass(frozen=True)
class Inputs:
    """The model and data of a run.

    fingerprints: the fingerprints of model, dataset and tokenizer, by name. earlier_run: the record
    of a run with checkpoints in this directory, {} for a new run; see previous_run.read_previous.
    named_checkpoint: the checkpoint that --resume names. scratch: the weights are initialised from
    the seed. shards, synthetic: the data with --streaming or `-d synthetic`, instead of corpora.
    model_identities: identities of the model's files, read before its fingerprint. stop_request:
    identity of the stop file that existed when this launch started. template: source of the chat
    template, "" without chat datasets. base: digests of the base model's weight files by name, for
    LoRA. adapter: the adapter of --lora-from.
    """

    model_dir: Path
    corpora: list[Corpus]
    fingerprints: dict[str, str]
    earlier_run: dict[str, Any]
    named_checkpoint: Checkpoint | None
    scratch: bool
    shards: RawShards | None = None
    synthetic: SyntheticText | None = None
    model_identities: file_identity.Identities = field(default_factory=dict)
    stop_request: file_identity.Identities = field(default_factory=dict)
    template: str = ""
    base: dict[str, str] = field(default_factory=dict)
    adapter: PeftAdapter | None = None

    @property
    def datasets(self) -> str:
        """Return the names of the datasets, with their weights."""
        return str(self.shards or self.synthetic or ", ".join(map(str, self.corpora)))

    def get_earlier_option(self, option: str) -> Any:
        """Return the value that an option had when the run was started, or None."""
        return self.earlier_run.get("identity", {}).get("options", {}).get(option)

    @property
    def identity(self) -> dict[str, Any]:
        """Return the identity of the run or checkpoint that this run resumes; {} for a new run."""
        return _get_identity(self.earlier_run, self.named_checkpoint)

    @property
    def recomputed(self) -> str:
        """Return the --activation-checkpointing of the earlier launch, "" if there was none."""
        values = [
            self.earlier_run.get(part, {}).get("activation_checkpointing")
            for part in ("settled", "options")
        ]
        return next((kind for kind in values if kind in RECOMPUTATIONS), "")

    def require_unchanged(self) -> None:
        """Raise UsageError if the files of the model have changed since this launch started."""
        file_identity.require_same(
            self.model_identities, f"the model {self.model_dir}", "the run started"
        )


def find_inputs(
    config: Config, experiment: Experiment, new_model: Path | None, earlier_run: dict[str, Any]
) -> Inputs:
    """Find and check the model and the data, without importing torch.

    new_model: the directory that --model-size or --config-json has created, else None. Without it
    and without -m, a run keeps its model. earlier_run: see Inputs. Raises UsageError or
    ArtifactError with all problems at once.
    """
    stop_files = [experiment.stop_file] if experiment.stop_file.exists() else []
    stop_request = file_identity.read_identities(stop_files)
    problems = Problems()
    named = problems.collect(lambda: previous_run.find_named_checkpoint(config, experiment))
    model_dir = problems.collect(
        lambda: _find_model(config, experiment, new_model, earlier_run, named)
    )
    synthetic = problems.collect(lambda: find_synthetic(config.dataset_name))
    corpora = (
        []
        if config.streaming or synthetic
        else problems.collect(lambda: mixture.open_corpora(config.dataset_name))
    )
    shards = (
        problems.collect(lambda: _open_shards(config, earlier_run)) if config.streaming else None
    )
    identity = _get_identity(earlier_run, named)
    adapter = problems.collect(lambda: find_adapter(config.lora_from, identity))
    problems.raise_if_any()
    assert model_dir is not None and corpora is not None  # or a problem was raised
    model_identities = file_identity.read_identities(directory.list_model_files(model_dir))
    if faults := chat_files.find_faults(model_dir):
        raise ArtifactError(
            f"the model {model_dir} is damaged",
            found="\n".join(faults),
            **lookup.model_remedy(model_dir, "--overwrite"),
        )
    named_model = [named.path.parent.parent / experiment.model.name] if named else []
    kept_template = previous_run.find_kept_template(
        [experiment.model, *named_model], identity.get("inputs", {}).get(previous_run.TEMPLATE)
    )
    template = _find_template(config, model_dir, corpora, kept_template)
    fingerprints = {
        "model": directory.fingerprint_model(model_dir),
        **_identify_data(config, model_dir, synthetic or shards or corpora),
        **({previous_run.TEMPLATE: hashing.fingerprint(template)} if template else {}),
        **identify_adapter(config, adapter, identity),
        **_keep_foreign_weights(identity),
    }
    scratch = _FOREIGN not in fingerprints and _is_from_scratch(
        config, model_dir, bool(earlier_run or named)
    )
    return Inputs(
        model_dir,
        corpora,
        fingerprints,
        earlier_run,
        named,
        scratch,
        shards,
        synthetic,
        model_identities,
        stop_request,
        template,
        adapter=adapter,
    )


# Only the first launch loads the adapter of --lora-from; later launches load the checkpoints of the
# run. The directory of the adapter may be deleted by then, so the identity of the run contains its
# fingerprint.
def find_adapter(directory: Path | None, identity: dict[str, Any]) -> PeftAdapter | None:
    """Return the adapter of --lora-from, None without that option.

    It is also None if the directory is gone but the run's checkpoints contain the adapter.
    identity: see Inputs. Raises UsageError or ArtifactError as `peft_adapter.read_adapter`.
    """
    is_kept = previous_run.ADAPTER in identity.get("inputs", {})
    if directory is None or (is_kept and not directory.exists()):
        return None
    return peft_adapter.read_adapter(directory)


def identify_adapter(
    config: Config, adapter: PeftAdapter | None, identity: dict[str, Any]
) -> dict[str, str]:
    """Return the fingerprint of the --lora-from adapter as an identity's input, {} without one."""
    if config.lora_from is None:
        return {}
    name = previous_run.ADAPTER
    return {name: adapter.fingerprint if adapter else identity["inputs"][name]}


def _keep_foreign_weights(identity: dict[str, Any]) -> dict[str, str]:
    """Return the input of a run that an earlier version began with --resume-from-foreign, or {}."""
    recorded = identity.get("inputs", {}).get(_FOREIGN)
    if recorded is None:
        return {}
    log.info(
        "the run began with --resume-from-foreign of an earlier version, which is no longer an "
        "option; it continues from its checkpoints, which contain those weights"
    )
    return {_FOREIGN: recorded}


def _find_model(
    config: Config,
    experiment: Experiment,
    new_model: Path | None,
    earlier_run: dict[str, Any],
    named: Checkpoint | None,
) -> Path:
    """Return the directory of the model, and log which it is unless it is a new one.

    It is the new model or that of -m, else the run's model, else the only prepared model.
    """
    if new_model:
        return new_model
    if config.model_name:
        return lookup.find_model(config.model_name, config.cache_dir)
    name = previous_run.find_previous_model(experiment, earlier_run, named, config.cache_dir)
    if config.from_scratch and name is None:
        checks.require_model_shape(config)
    return lookup.find_model(
        name, config.cache_dir, f", with which {experiment.root} was started" if name else ""
    )


def has_chats(corpora: Sequence[Corpus]) -> bool:
    """Return whether any of the datasets consists of conversations."""
    return any(corpus.dataset.format == CHAT for corpus in corpora)


def _find_template(
    config: Config, model_dir: Path, corpora: Sequence[Corpus], kept_template: KeptTemplate | None
) -> str:
    """Return the source of the template that renders conversations; "" without chat datasets.

    kept_template: the template that a resumed run was started with, if any; --chat-template can
    replace it. Raises UsageError if there is no template, or if options for chat datasets are typed
    without such a dataset.
    """
    if has_chats(corpora):
        return _find_chat_template(config, model_dir, kept_template)
    problems = Problems()
    for name in _CHAT_OPTIONS:
        if getattr(config, name) != getattr(DEFAULTS, name):
            problems.add(
                f"{declared.flag(name)} belongs to chat datasets, and there is none",
                found=", ".join(config.dataset_name),
                expected="-d with a dataset that stage 02 has made with --format chat",
            )
    problems.raise_if_any()
    return ""


def _find_chat_template(config: Config, model_dir: Path, kept_template: KeptTemplate | None) -> str:
    if kept_template is None:
        return policy.find_template(model_dir, config.chat_template)
    if config.chat_template:
        typed = policy.find_template(model_dir, config.chat_template)
        return kept_template.source if typed == kept_template.text else typed
    try:
        has_changed = policy.find_template(model_dir, None) != kept_template.source
    except StageError:  # the model has no template, or an unreadable one
        has_changed = True
    if has_changed:
        log.info(
            f"chat template: {kept_template.path}, with which the run was started; {model_dir} now "
            "contains another one or none"
        )
    return kept_template.source


def _get_identity(earlier_run: dict[str, Any], named: Checkpoint | None) -> dict[str, Any]:
    """Return the identity of the run or checkpoint to resume; see Inputs."""
    record: dict[str, Any] = earlier_run or (named.commit() if named else {})
    identity: dict[str, Any] = record.get("identity", {})
    return identity


def is_complete(config: Config, experiment: Experiment, inputs: Inputs) -> bool:
    """Return whether this run has already reached its end, and log that; takes milliseconds.

    config: the options after `settle_from_files`.
    """
    checkpoint = (
        None
        if config.overwrite or inputs.named_checkpoint or config.prepare_only
        else commit.find_newest(experiment.checkpoints)
    )
    if checkpoint is None:
        return False
    facts = checkpoint.commit()
    planned = Plan.of(config, inputs.fingerprints, facts["samples_per_epoch"])
    is_unevaluated = checkpoint.step == planned.total_steps and "unevaluated" in facts
    if (
        checkpoint.step < planned.total_steps
        or is_unevaluated
        or find_differences(facts["identity"], planned.identity())
    ):
        return False
    state_file.mark_complete(experiment, checkpoint.step)
    log.info(
        f"already done: {experiment.root} is complete at step {checkpoint.step:,}; raise "
        f"--num-epochs or --max-steps to go on\n{plan.next_command(config, experiment)}"
    )
    return True


def _is_from_scratch(config: Config, model_dir: Path, has_begun: bool) -> bool:
    """Return whether the first weights are initialised from the seed.

    This is the case with --from-scratch and --bench, for a model that stage 03 made from scratch,
    for a model without weights on synthetic tokens, and for a resumed run that began in one of
    these ways. In all other cases, raises ArtifactError if weights are missing; --prepare-only and
    --plan-gpus only warn. Raises UsageError for LoRA from scratch.
    """
    if config.bench:
        return True
    is_bare = not directory.has_weights(model_dir) and bool(find_synthetic(config.dataset_name))
    if config.from_scratch or is_bare or directory.is_made_from_scratch(model_dir):
        if config.trains_lora:
            raise UsageError(
                f"--lora-rank needs a base model with weights, and those of {model_dir} would be "
                "initialised from the seed",
                expected="-m with a model that was trained before",
                hint="without --lora-rank, the whole model is trained",
            )
        if is_bare and not (config.from_scratch or has_begun):
            log.detail(
                f"{paths.short_name(model_dir)} has no weights: they are initialised from --seed "
                f"{config.seed}"
            )
        return True
    if has_begun and not config.trains_lora:
        return not directory.has_weights(model_dir)
    if missing := directory.list_missing_weights(model_dir):
        error = ArtifactError(
            f"the model {model_dir} has no weights"
            if not directory.has_weights(model_dir)
            else f"the weights of the model {model_dir} are incomplete",
            found=units.join_lines(missing, 5),
            expected=f"{directory.WEIGHTS}, or {directory.INDEX} and the shards that it names",
            hint="copy the missing files to it; with --from-scratch, training would start with "
            "random weights",
        )
        if not (config.prepare_only or config.plan_gpus):
            raise error
        log.warn("training would end here: " + error.render().removeprefix("error: "))
    return False


def _open_shards(config: Config, earlier_run: dict[str, Any]) -> RawShards:
    """Return the shards of --streaming; UsageError or ArtifactError if there are none.

    earlier_run: see Inputs. A resumed run keeps the commit of its dataset on the Hub.
    """
    name = config.dataset_name[0]
    if not config.online:
        return raw_shards.open_directory(find_dataset(name))
    revision = earlier_run.get("identity", {}).get("inputs", {}).get("commit", "main")
    root = paths.streaming_root(config.cache_dir, name)
    dataset = HubDataset(name, revision, config.include or ["*"], root)
    return raw_shards.open_repository(name, dataset.commit, dataset.sizes, root, dataset)


def _identify_data(
    config: Config, model_dir: Path, data: SyntheticText | RawShards | list[Corpus]
) -> dict[str, str]:
    """Return the inputs, apart from the model, that must stay the same in a resume, by name.

    With raw shards the number of ranks must stay the same, because each rank resumes in its own
    part of the shards. Synthetic tokens need no tokenizer.
    """
    if isinstance(data, SyntheticText):
        return {"dataset": data.fingerprint}
    tokenizer = {"tokenizer": artifacts.tokenizer_fingerprint(model_dir)}
    if isinstance(data, list):
        return {**tokenizer, "dataset": mixture.fingerprint_corpora(data)}
    shared = {
        **tokenizer,
        "dataset": data.fingerprint,
        "text field": get_text_field(config),
        "ranks": str(batch_division.get_degrees(config).dp_size(plan.get_world_size())),
    }
    return {**shared, "commit": data.commit} if data.commit else shared


def get_text_field(config: Config) -> str:
    """Return the name of the field or column that contains the text, for --streaming."""
    return config.text_field or "text"
