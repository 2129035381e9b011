"""Find and check the model and the data that a run starts from, before torch is imported."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lib.checkpoints import commit
from lib.checkpoints.commit import Checkpoint
from lib.core import file_identity, hashing, log, paths, units
from lib.core.errors import ArtifactError, Problems
from lib.core.identity import find_differences
from lib.core.paths import Experiment
from lib.models import chat_files, directory, lookup
from lib.models.peft_adapter import PeftAdapter
from lib.parallel.degrees import RECOMPUTATIONS
from lib.runs import run_records, state_file
from lib.train import checks, plan, previous_run
from lib.train.config import Config
from lib.train.output.kinds import OutputKind
from lib.train.plan import Plan
from lib.train.source import Encoding, SampleSource
from lib.train.trained import choose_trained, find_adapter, identify_adapter

_FOREIGN = "foreign weights"  # input of --resume-from-foreign of an earlier version


@dataclass(frozen=True)
class Inputs:
    """The model and data of a run.

    fingerprints: the fingerprints of model, dataset and tokenizer, by name. earlier_run: the record
    of a run with checkpoints in this directory, {} for a new run; see previous_run.read_previous.
    named_checkpoint: the checkpoint that --resume names. scratch: the weights are initialised from
    the seed. model_identities: identities of the model's files, read before its fingerprint.
    stop_request: identity of the stop file that existed when this launch started. template: source
    of the chat template, "" without chat datasets. base: digests of the base model's weight files
    by name, for LoRA. adapter: the adapter of --lora-from.
    """

    model_dir: Path
    source: SampleSource
    fingerprints: dict[str, str]
    earlier_run: dict[str, Any]
    named_checkpoint: Checkpoint | None
    scratch: bool
    model_identities: file_identity.Identities = field(default_factory=dict)
    stop_request: file_identity.Identities = field(default_factory=dict)
    template: str = ""
    base: dict[str, str] = field(default_factory=dict)
    adapter: PeftAdapter | None = None

    def get_earlier_option(self, option: str) -> Any:
        """Return the value that an option had when the run was started, or None."""
        return self.earlier_run.get("identity", {}).get("options", {}).get(option)

    @property
    def identity(self) -> dict[str, Any]:
        """Return the identity of the run or checkpoint that this run resumes; {} for a new run."""
        return _get_identity(self.earlier_run, self.named_checkpoint)

    @property
    def settled(self) -> dict[str, Any]:
        """Return the options that the run to resume has chosen by itself; {} for a new run.

        For a named checkpoint it is the run in whose directory the checkpoint lies.
        """
        record = self.earlier_run
        if not record and self.named_checkpoint:
            record = run_records.read_config(_find_run(self.named_checkpoint))
        settled: dict[str, Any] = record.get("settled", {})
        return settled

    @property
    def recomputed(self) -> str:
        """Return the --activation-checkpointing of the earlier launch, "" if there was none."""
        values = [
            self.earlier_run.get(part, {}).get("activation_checkpointing")
            for part in ("settled", "options")
        ]
        return next((kind for kind in values if kind in RECOMPUTATIONS), "")

    def encode_for(self, vocab_size: int) -> Encoding:
        """Return how text becomes tokens for a model that knows `vocab_size` tokens."""
        return Encoding(self.model_dir, vocab_size, self.template, bool(self.identity))

    def require_unchanged(self) -> None:
        """Raise UsageError if the files of the model have changed since this launch started."""
        file_identity.require_same(
            self.model_identities, f"the model {self.model_dir}", "the run started"
        )


def find_inputs(
    config: Config,
    experiment: Experiment,
    kind: type[OutputKind],
    source_class: type[SampleSource],
    new_model: Path | None,
    earlier_run: dict[str, Any],
) -> Inputs:
    """Find and check the model and the data, without importing torch.

    new_model: the directory that --model-size has created, else None. Without it
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
    earlier_inputs = _get_identity(earlier_run, None).get("inputs", {})
    source = problems.collect(lambda: source_class.open(config, earlier_inputs))
    identity = _get_identity(earlier_run, named)
    adapter = problems.collect(lambda: find_adapter(config, identity))
    problems.raise_if_any()
    assert model_dir is not None and source is not None  # or a problem was raised
    model_identities = file_identity.read_identities(directory.list_model_files(model_dir))
    if faults := chat_files.find_faults(model_dir):
        raise ArtifactError(
            f"the model {model_dir} is damaged",
            found="\n".join(faults),
            **lookup.model_remedy(model_dir, "--overwrite"),
        )
    named_model = [_find_run(named).model] if named else []
    kept_template = previous_run.find_kept_template(
        [experiment.model, *named_model], identity.get("inputs", {}).get(previous_run.TEMPLATE)
    )
    template = source.find_template(config, model_dir, kept_template)
    fingerprints = {
        "model": directory.fingerprint_model(model_dir),
        **source.identify(config, model_dir),
        **({previous_run.TEMPLATE: hashing.fingerprint(template)} if template else {}),
        **identify_adapter(config, adapter, identity),
        **_keep_foreign_weights(identity),
    }
    scratch = _FOREIGN not in fingerprints and (
        not kind.reads_weights
        or _is_from_scratch(config, model_dir, source, bool(earlier_run or named))
    )
    return Inputs(
        model_dir,
        source,
        fingerprints,
        earlier_run,
        named,
        scratch,
        model_identities,
        stop_request,
        template,
        adapter=adapter,
    )


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


def _find_run(checkpoint: Checkpoint) -> Experiment:
    """Return the run in whose directory a checkpoint lies."""
    root = checkpoint.path.parents[1]
    return Experiment(root.parent, root.name)


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


def _is_from_scratch(
    config: Config, model_dir: Path, source: SampleSource, has_begun: bool
) -> bool:
    """Return whether the first weights are initialised from the seed.

    This is the case with --from-scratch, for a model that stage 03 made from scratch,
    for a model without weights on synthetic tokens, and for a resumed run that began in one of
    these ways. In all other cases, raises ArtifactError if weights are missing; --prepare-only and
    --plan-gpus only warn. Raises UsageError for an adapter from scratch.
    """
    trained = choose_trained(config)
    is_bare = not (source.needs_weights or directory.has_weights(model_dir))
    if config.from_scratch or is_bare or directory.is_made_from_scratch(model_dir):
        trained.require_weights(model_dir)
        if is_bare and not (config.from_scratch or has_begun):
            log.detail(
                f"{paths.short_name(model_dir)} has no weights: they are initialised from --seed "
                f"{config.seed}"
            )
        return True
    if has_begun and not trained.freezes_base:
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
