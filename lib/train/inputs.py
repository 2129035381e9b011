"""Find and check the model and the data that a run starts from, before torch is imported.

`--from-scratch --model-size SIZE --tokenizer DIR` creates the config and tokenizer that stage 03
would create, in `.cache/scratch/`. If that directory was deleted, it is created again.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lib.checkpoints import commit
from lib.checkpoints.commit import Checkpoint
from lib.core import (
    artifacts,
    commands,
    declared,
    file_identity,
    hashing,
    log,
    manifest,
    paths,
    publish,
    units,
)
from lib.core.errors import ArtifactError, Problems, StageError, UsageError
from lib.core.identity import find_differences
from lib.core.paths import Experiment
from lib.hub.dataset import HubDataset
from lib.models import chat_files, directory, lookup, peft_adapter, tokenizer
from lib.models.peft_adapter import PeftAdapter
from lib.models.scratch import Design
from lib.parallel.degrees import RECOMPUTATIONS
from lib.tokens import build, mixture, raw_shards
from lib.tokens.chat import policy
from lib.tokens.columns import CHAT
from lib.tokens.dataset import find_dataset
from lib.tokens.mixture import Corpus
from lib.tokens.raw_shards import RawShards
from lib.train import checks, plan, previous_run
from lib.train.config import DEFAULTS, Config
from lib.train.plan import Plan
from lib.train.previous_run import KeptTemplate

KIND = "scratch/1"
_CHAT_OPTIONS = ("chat_template", "train_on", "too_long")
_PREVIEW_BYTES = 2_000_000  # of text to train a tokenizer for a dry run, in a second or two


@dataclass(frozen=True)
class Inputs:
    """The model and data of a run.

    fingerprints: the fingerprints of model, dataset and tokenizer, by name. earlier_run: the record
    of a run with checkpoints in this directory, {} for a new run; see previous_run.read_previous.
    named_checkpoint: the checkpoint that --resume names. scratch: the weights are initialised from
    the seed. shards: the data with --streaming, instead of corpora. model_stamps: identities of the
    model's files, read before its fingerprint. stop_request: identity of the stop file that existed
    when this launch started. template: source of the chat template, "" without chat datasets. base:
    digests of the base model's weight files by name, for LoRA. adapter: the adapter of --lora-from.
    """

    model_dir: Path
    corpora: list[Corpus]
    fingerprints: dict[str, str]
    earlier_run: dict[str, Any]
    named_checkpoint: Checkpoint | None
    scratch: bool
    shards: RawShards | None = None
    model_stamps: file_identity.Identities = field(default_factory=dict)
    stop_request: file_identity.Identities = field(default_factory=dict)
    template: str = ""
    base: dict[str, str] = field(default_factory=dict)
    adapter: PeftAdapter | None = None

    @property
    def datasets(self) -> str:
        """Return the names of the datasets, with their weights."""
        return str(self.shards or ", ".join(map(str, self.corpora)))

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
            self.model_stamps, f"the model {self.model_dir}", "the run started"
        )


def find_inputs(
    config: Config, experiment: Experiment, new_model: Path | None, earlier_run: dict[str, Any]
) -> Inputs:
    """Find and check the model and the data, without importing torch.

    new_model: the directory that --model-size has created, else None. Without it and without -m, a
    run keeps its model. earlier_run: see Inputs. Raises UsageError or ArtifactError with all
    problems at once.
    """
    stop_files = [experiment.stop_file] if experiment.stop_file.exists() else []
    stop_request = file_identity.read_identities(stop_files)
    problems = Problems()
    named = problems.collect(lambda: previous_run.find_named_checkpoint(config, experiment))
    model_dir = problems.collect(
        lambda: _find_model(config, experiment, new_model, earlier_run, named)
    )
    corpora = (
        []
        if config.streaming
        else problems.collect(lambda: mixture.open_corpora(config.dataset_name))
    )
    shards = (
        problems.collect(lambda: _open_shards(config, earlier_run)) if config.streaming else None
    )
    identity = _get_identity(earlier_run, named)
    adapter = problems.collect(lambda: _find_adapter(config.lora_from, identity))
    problems.raise_if_any()
    assert model_dir is not None and corpora is not None  # or a problem was raised
    model_stamps = file_identity.read_identities(directory.list_model_files(model_dir))
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
        "tokenizer": artifacts.tokenizer_fingerprint(model_dir),
        **(
            _identify_shards(config, shards)
            if shards
            else {"dataset": mixture.fingerprint_corpora(corpora)}
        ),
        **({previous_run.TEMPLATE: hashing.fingerprint(template)} if template else {}),
        **_identify_adapter(config, adapter, identity),
    }
    scratch = _is_from_scratch(config, model_dir, bool(earlier_run or named))
    return Inputs(
        model_dir,
        corpora,
        fingerprints,
        earlier_run,
        named,
        scratch,
        shards,
        model_stamps,
        stop_request,
        template,
        adapter=adapter,
    )


def _find_model(
    config: Config,
    experiment: Experiment,
    new_model: Path | None,
    earlier_run: dict[str, Any],
    named: Checkpoint | None,
) -> Path:
    """Return the directory of the model, and log which it is.

    It is the model of --model-size or -m, else the run's model, else the only prepared model.
    """
    if new_model:
        lookup.log_model(new_model, f", {config.model_size} from scratch")
        return new_model
    if config.model_name:
        return lookup.find_model(config.model_name, config.cache_dir)
    name = previous_run.find_previous_model(experiment, earlier_run, named, config.cache_dir)
    if config.from_scratch and name is None:
        checks.require_model_shape(config)
    return lookup.find_model(
        name, config.cache_dir, f", with which {experiment.root} was begun" if name else ""
    )


def _find_adapter(directory: Path | None, identity: dict[str, Any]) -> PeftAdapter | None:
    """Return the adapter of --lora-from, None without that option.

    It is also None if the directory is gone but the run's checkpoints contain the adapter.
    identity: see Inputs. Raises UsageError or ArtifactError as `peft_adapter.read_adapter`.
    """
    is_kept = previous_run.ADAPTER in identity.get("inputs", {})
    if directory is None or (is_kept and not directory.exists()):
        return None
    return peft_adapter.read_adapter(directory)


def _identify_adapter(
    config: Config, adapter: PeftAdapter | None, identity: dict[str, Any]
) -> dict[str, str]:
    """Return the fingerprint of the --lora-from adapter as an identity's input, {} without one."""
    if config.lora_from is None:
        return {}
    name = previous_run.ADAPTER
    return {name: adapter.fingerprint if adapter else identity["inputs"][name]}


def has_chats(corpora: Sequence[Corpus]) -> bool:
    """Return whether any of the datasets consists of conversations."""
    return any(corpus.dataset.format == CHAT for corpus in corpora)


def _find_template(
    config: Config, model_dir: Path, corpora: Sequence[Corpus], kept: KeptTemplate | None
) -> str:
    """Return the source of the template that renders conversations; "" without chat datasets.

    kept: the template that a resumed run was started with, if any; --chat-template can replace it.
    Raises UsageError if there is no template, or if options for chat datasets are typed without
    such a dataset.
    """
    if has_chats(corpora):
        return _find_chat_template(config, model_dir, kept)
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


def _find_chat_template(config: Config, model_dir: Path, kept: KeptTemplate | None) -> str:
    if kept is None:
        return policy.find_template(model_dir, config.chat_template)
    if config.chat_template:
        typed = policy.find_template(model_dir, config.chat_template)
        return kept.source if typed == kept.text else typed
    try:
        has_changed = policy.find_template(model_dir, None) != kept.source
    except StageError:  # the model has no template, or an unreadable one
        has_changed = True
    if has_changed:
        log.info(
            f"chat template: {kept.path}, with which the run was begun; {model_dir} has "
            "another one now, or none"
        )
    return kept.source


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
    if checkpoint.step < planned.total_steps or find_differences(
        facts["identity"], planned.identity()
    ):
        return False
    previous_run.mark_complete(experiment, checkpoint.step)
    log.info(
        f"already done: {experiment.root} is complete at step {checkpoint.step:,}; raise "
        f"--num-epochs or --max-steps to go on\n{plan.next_command(config, experiment)}"
    )
    return True


def _is_from_scratch(config: Config, model_dir: Path, has_begun: bool) -> bool:
    """Return whether the first weights are initialised from the seed.

    This is the case with --from-scratch, for a model that stage 03 made from scratch, and for a
    resumed run that began in one of these ways. In all other cases, raises ArtifactError if weights
    are missing; --prepare-only and --plan-gpus only warn. Raises UsageError for LoRA from scratch.
    """
    if config.from_scratch or directory.is_made_from_scratch(model_dir):
        if config.trains_lora:
            raise UsageError(
                f"--lora-rank needs a base model with weights, and those of {model_dir} would be "
                "initialised from the seed",
                expected="-m with a model that was trained before",
                hint="without --lora-rank, the whole model is trained",
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


def _identify_shards(config: Config, shards: RawShards) -> dict[str, str]:
    """Return the inputs of a run on raw shards that must stay the same in a resume, by name.

    The number of ranks must stay the same, because each rank resumes in its own part of the shards.
    """
    shared = {
        "dataset": shards.fingerprint,
        "text field": get_text_field(config),
        "ranks": str(plan.get_degrees(config).dp_size(plan.get_world_size())),
    }
    return {**shared, "commit": shards.commit} if shards.commit else shared


def get_text_field(config: Config) -> str:
    """Return the name of the field or column that contains the text, for --streaming."""
    return config.text_field or "text"


@contextmanager
def model_from_scratch(
    config: Config, experiment: Experiment, has_begun: bool
) -> Iterator[Path | None]:
    """Yield the model directory of --model-size, and create it if needed; None without the option.

    The directory stays in the cache, except after a dry run. Without --tokenizer, a tokenizer is
    trained on the datasets; a resumed run keeps its tokenizer. Raises UsageError if a tokenizer
    does not load or fit, and the errors of `mixture.open_corpora` for datasets.
    """
    if not config.model_size:
        yield None
        return
    keeps_tokenizer = has_begun and (experiment.model / directory.CONFIG).is_file()
    copy_from = config.tokenizer or (experiment.model if keeps_tokenizer else None)
    train_on = (
        ()
        if copy_from or config.streaming
        else tuple(corpus.dataset.path for corpus in mixture.open_corpora(config.dataset_name))
    )
    design = Design(config.model_size, None, config.vocab_size, train_on, copy_from)
    content = design.identity(design.choose_name())
    target = (
        paths.scratch_root(config.cache_dir)
        / f"{config.model_size}-{hashing.fingerprint(content)[:12]}"
    )
    if config.dry_run and not target.exists():
        with tempfile.TemporaryDirectory() as folder:
            _create_model(design, Path(folder) / target.name, content, config, _PREVIEW_BYTES)
            yield Path(folder) / target.name
        return
    build.build_once(
        target,
        KIND,
        content,
        lambda: _create_model(design, target, content, config),
        lambda existing: manifest.require_intact(
            target,
            existing,
            "the model from scratch",
            deep=True,
            run=commands.delete_and_rerun(target),
        ),
    )
    yield target


def _create_model(
    design: Design,
    target: Path,
    content: dict[str, Any],
    config: Config,
    limit: int = tokenizer.SAMPLE_BYTES,
) -> None:
    """Create the model directory. limit: bytes of text to train a tokenizer on, at most."""
    from lib.models import check

    vocabulary = design.vocabulary()
    with publish.Build(target, KIND, content, overwrite=False) as building:
        design.write_tokenizer(building.dir, config.num_workers, not config.no_progress, limit)
        config_facts = design.write_configs(building.dir, vocabulary)
        facts = check.check_build(building, weights=False, name=f"--model-size {config.model_size}")
        design.require_same(content, design.choose_name())
        files = [manifest.file_entry(building.dir, path, "sha256") for path in building.files()]
        building.publish(
            stage="04_train_fsdp.py",
            options=config.to_record(),
            files=files,
            summary={"source": "scratch", "parameters": facts.parameters, **config_facts},
        )
    rows = ", ".join(f"{name} {text}" for name, text in design.describe(vocabulary).items())
    log.info(f"made from scratch: {rows}; tokenizer: {design.describe_tokenizer()}")
