"""The model and the data that a run begins with: found and checked from files alone, before torch.

Config and tokenizer of `--from-scratch --model-size SIZE --tokenizer DIR` are those that stage 03
would make. They lie in `.cache/scratch/`, derived like tokens: whoever deletes them has them made
again.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lib.checkpoints import commit
from lib.checkpoints.commit import Checkpoint
from lib.core import (
    artifacts,
    commands,
    file_identity,
    hashing,
    log,
    manifest,
    paths,
    publish,
    units,
)
from lib.core.errors import ArtifactError, Problems, UsageError
from lib.core.identity import differences
from lib.core.paths import Experiment
from lib.hub.dataset import HubDataset
from lib.models import chat_files, directory, lookup, tokenizer
from lib.models.peft_adapter import PeftAdapter
from lib.models.scratch import Design
from lib.parallel.degrees import RECOMPUTATIONS
from lib.tokens import build, mixture, raw_shards
from lib.tokens.dataset import find_dataset
from lib.tokens.mixture import Corpus
from lib.tokens.raw_shards import RawShards
from lib.train import chats, checks, earlier, lora_from, plan
from lib.train.config import AUTO, Config
from lib.train.plan import Plan

KIND = "scratch/1"
_BALANCE = "router_aux_loss"
KEPT = "earlier launch"  # where a value is from that a run was begun with
_PREVIEW_BYTES = 2_000_000  # of text that a tokenizer is trained on for a plan, in a second or two


@dataclass(frozen=True)
class Inputs:
    """fingerprints: of model, dataset and tokenizer. shards: of --streaming, instead of corpora.

    begun: what the run that has left checkpoints here was begun with; empty when there is none.
    named: the checkpoint that --resume names. scratch: the first weights are drawn from the seed.
    model_stamps: of the model's files, from before its fingerprint. stop_request: of the stop file
    that lay there when this launch began. template: of the chat datasets, "" without any. base:
    digests of the weight files of a model that stays frozen, by name. adapter: of --lora-from.
    """

    model_dir: Path
    corpora: list[Corpus]
    fingerprints: dict[str, str]
    begun: dict[str, Any]
    named: Checkpoint | None
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

    def begun_with(self, option: str) -> Any:
        """Return the value of an option that the run was begun with, or None."""
        return self.begun.get("identity", {}).get("options", {}).get(option)

    @property
    def recomputed(self) -> str:
        """Return the --activation-checkpointing that the run was begun with, "" where unknown."""
        found = [
            self.begun.get(part, {}).get("activation_checkpointing")
            for part in ("settled", "options")
        ]
        return next((kind for kind in found if kind in RECOMPUTATIONS), "")

    def require_unchanged(self) -> None:
        """Raise UsageError when the model is not the one any more that the run was planned with."""
        file_identity.require_same(
            self.model_stamps, f"the model {self.model_dir}", "the run started"
        )


def find_inputs(
    config: Config, experiment: Experiment, made: Path | None, begun: dict[str, Any]
) -> Inputs:
    """Find and check model and dataset without importing torch.

    made: the model of --model-size. Without it and -m, a run keeps the model that it was begun
    with. begun: see Inputs. Raises UsageError or ArtifactError, telling all that is wrong at once.
    """
    stop_files = [experiment.stop_file] if experiment.stop_file.exists() else []
    stop_request = file_identity.read_identities(stop_files)
    problems = Problems()
    named = problems.collect(lambda: earlier.named_checkpoint(config, experiment))
    model_dir = problems.collect(lambda: _find_model(config, experiment, made, begun, named))
    corpora = (
        []
        if config.streaming
        else problems.collect(lambda: mixture.open_corpora(config.dataset_name))
    )
    shards = problems.collect(lambda: _open_shards(config, begun)) if config.streaming else None
    identity = _identity(begun, named)
    adapter = problems.collect(lambda: lora_from.find(config.lora_from, identity))
    problems.raise_if_any()
    assert model_dir is not None and corpora is not None  # or a problem was raised
    model_stamps = file_identity.read_identities(directory.list_model_files(model_dir))
    if faults := chat_files.find_faults(model_dir):
        raise ArtifactError(
            f"the model {model_dir} is damaged",
            found="\n".join(faults),
            **lookup.model_remedy(model_dir, "--overwrite"),
        )
    of_named = [named.path.parent.parent / experiment.model.name] if named else []
    begun_with = chats.kept_template(
        [experiment.model, *of_named], identity.get("inputs", {}).get(earlier.TEMPLATE)
    )
    source = chats.find_template(config, model_dir, corpora, begun_with)
    fingerprints = {
        "model": directory.fingerprint_model(model_dir),
        "tokenizer": artifacts.tokenizer_fingerprint(model_dir),
        **(
            _shards_identity(config, shards)
            if shards
            else {"dataset": mixture.fingerprint_corpora(corpora)}
        ),
        **({earlier.TEMPLATE: hashing.fingerprint(source)} if source else {}),
        **lora_from.fingerprint(config, adapter, identity),
    }
    scratch = _is_from_scratch(config, model_dir, bool(begun or named))
    return Inputs(
        model_dir,
        corpora,
        fingerprints,
        begun,
        named,
        scratch,
        shards,
        model_stamps,
        stop_request,
        source,
        adapter=adapter,
    )


def _find_model(
    config: Config,
    experiment: Experiment,
    made: Path | None,
    begun: dict[str, Any],
    named: Checkpoint | None,
) -> Path:
    """Return the model of --model-size or -m, that of the run, or the only one; and log which."""
    if made:
        lookup.log_model(made, f", {config.model_size} from scratch")
        return made
    if config.model_name:
        return lookup.find_model(config.model_name, config.cache_dir)
    name = earlier.model_of(experiment, begun, named, config.cache_dir)
    if config.from_scratch and name is None:
        checks.require_shape(config)
    return lookup.find_model(
        name, config.cache_dir, f", with which {experiment.root} was begun" if name else ""
    )


def settle(config: Config, inputs: Inputs) -> Config:
    """Return the options with what files decide where they are silent.

    Raises UsageError when the learning rate would rise to its minimum.
    """
    config = chats.settle_packing(keep_global_batch(config, inputs), inputs.corpora)
    config = lora_from.settle(config, inputs.adapter, _identity(inputs.begun, inputs.named))
    for name in ("seq_length", "precision"):
        if getattr(config, name) is None and (value := inputs.begun_with(name)):
            config = config.with_values(KEPT, **{name: value})
    identity = _identity(inputs.begun, inputs.named)
    if config.router_aux_loss == AUTO and (value := identity.get("options", {}).get(_BALANCE)):
        config = config.with_values(KEPT, router_aux_loss=value)
    if config.lr is None:
        why = "from scratch" if inputs.scratch else "a model with weights"
        config = config.with_values(
            "adapters" if config.lora_rank else why,
            lr=checks.DEFAULT_LRS[inputs.scratch] * (checks.LORA_LR if config.lora_rank else 1),
        )
    if config.min_lr is None:
        config = config.with_values("a tenth of --lr", min_lr=config.lr / 10)
    checks.require_falling(config, config.lr)
    if config.lora_rank and config.lora_alpha is None:
        config = config.with_values("2 × --lora-rank", lora_alpha=2.0 * config.lora_rank)
    return config


def _identity(begun: dict[str, Any], named: Checkpoint | None) -> dict[str, Any]:
    """Return the identity of what a run goes on from, {} where it begins. See Inputs."""
    found: dict[str, Any] = (begun or (named.commit() if named else {})).get("identity", {})
    return found


def keep_global_batch(config: Config, inputs: Inputs) -> Config:
    """Return the options with the samples of a step as the run was begun with.

    They are kept where nobody typed another number: on other ranks, with another batch per process
    and whatever fits into the memory of this machine, a step is divided anew. Raises UsageError
    when it cannot be.
    """
    batch = _identity(inputs.begun, inputs.named).get("options", {}).get("global_batch_size")
    is_auto = config.batch_size == AUTO
    if (
        not batch
        or config.global_batch_size
        or config.prepare_only
        or (config.resume_with_changes and not is_auto)
    ):
        return config
    kept = config.with_values(KEPT, global_batch_size=batch, grad_accum_steps=None)
    asked = plan.divide(config, 0, plan.launched_size())
    if is_auto or asked.global_batch == batch:
        return kept if is_auto else config
    begun = f"the {units.counted(batch, 'sample')} of a step that the run was begun with"
    try:
        divided = plan.divide(kept, 0, plan.launched_size())
    except UsageError as error:
        raise UsageError(
            f"{begun} cannot be divided",
            expected=error.expected,
            hint="take another number of ranks or another --batch-size; "
            "--resume-with-changes with --max-steps goes on with the step that "
            "the options make",
        ) from error
    if config.batch_size is None:  # on a GPU it is divided otherwise, which is said there
        return kept
    log.info(
        f"{begun} are kept: {divided.micro_batch} per process × {divided.accumulation} "
        f"accumulation × {units.counted(divided.dp_size, 'rank')}; the options alone would "
        f"make it {asked.global_batch:,}"
    )
    return kept


def is_complete(config: Config, experiment: Experiment, inputs: Inputs) -> bool:
    """Tell whether this very run has already reached its end, and say so; takes milliseconds."""
    checkpoint = (
        None
        if config.overwrite or inputs.named or config.prepare_only
        else commit.find_newest(experiment.checkpoints)
    )
    if checkpoint is None:
        return False
    facts = checkpoint.commit()
    planned = Plan.of(config, inputs.fingerprints, facts["samples_per_epoch"])
    if checkpoint.step < planned.total_steps or differences(facts["identity"], planned.identity()):
        return False
    earlier.mark_complete(experiment, checkpoint.step)
    log.info(
        f"already done: {experiment.root} is complete at step {checkpoint.step:,}; raise "
        f"--num-epochs or --max-steps to go on\n{plan.next_command(config, experiment)}"
    )
    return True


def _is_from_scratch(config: Config, model_dir: Path, has_begun: bool) -> bool:
    """Tell whether the first weights are drawn from the seed.

    That is so when --from-scratch was typed, when stage 03 made the model from scratch, or when the
    run has begun so: then its weights are in its checkpoints. Raises ArtifactError when weights are
    missing and nobody asked for random ones; of tokens or a plan for other machines, a warning.
    Adapters are trained beside weights that are there: UsageError where they would be drawn.
    """
    if config.from_scratch or directory.is_made_from_scratch(model_dir):
        if config.trains_lora:
            raise UsageError(
                f"--lora-rank trains adapters beside a model that has weights, and "
                f"those of {model_dir} would be drawn from the seed",
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
            else f"the weights of the model {model_dir} are not whole",
            found=units.join_lines(missing, 5),
            expected=f"{directory.WEIGHTS}, or {directory.INDEX} and the shards that it names",
            hint="copy the missing files to it; with --from-scratch, training would begin with "
            "random weights",
        )
        if not (config.prepare_only or config.plan_gpus):
            raise error
        log.warn("training would end here: " + error.render().removeprefix("error: "))
    return False


def _open_shards(config: Config, begun: dict[str, Any]) -> RawShards:
    """Return the shards; UsageError or ArtifactError when there are none.

    begun: see Inputs; a run that has begun keeps the commit of a dataset on the Hub.
    """
    name = config.dataset_name[0]
    if not config.online:
        return raw_shards.open_directory(find_dataset(name))
    revision = begun.get("identity", {}).get("inputs", {}).get("commit", "main")
    root = paths.streaming_root(config.cache_dir, name)
    dataset = HubDataset(name, revision, config.include or ["*"], root)
    return raw_shards.open_repository(name, dataset.commit, dataset.sizes, root, dataset)


def _shards_identity(config: Config, found: RawShards) -> dict[str, str]:
    """Return what a resumed run must share of the shards: each rank continues in its own part."""
    shared = {
        "dataset": found.fingerprint,
        "text field": text_field(config),
        "ranks": str(plan.degrees(config).dp_size(plan.launched_size())),
    }
    return {**shared, "commit": found.commit} if found.commit else shared


def text_field(config: Config) -> str:
    """Return the name of the field or column that holds the text."""
    return config.text_field or "text"


@contextmanager
def model_from_scratch(
    config: Config, experiment: Experiment, has_begun: bool
) -> Iterator[Path | None]:
    """Make the directory of the model for the while; None without --model-size.

    It stays in the cache, but for a dry run. Where no tokenizer is given, one is trained on the
    datasets, and a run that has begun keeps the one that it has. Raises UsageError when a tokenizer
    does not load or fit, and as `mixture.open_corpora` for datasets.
    """
    if not config.model_size:
        yield None
        return
    has_own = has_begun and (experiment.model / directory.CONFIG).is_file()
    copy_from = config.tokenizer or (experiment.model if has_own else None)
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
            _make(design, Path(folder) / target.name, content, config, _PREVIEW_BYTES)
            yield Path(folder) / target.name
        return
    build.build_once(
        target,
        KIND,
        content,
        lambda: _make(design, target, content, config),
        lambda made: manifest.check(
            target, made, "the model from scratch", deep=True, run=commands.delete_and_rerun(target)
        ),
    )
    yield target


def _make(
    design: Design,
    target: Path,
    content: dict[str, Any],
    config: Config,
    limit: int = tokenizer.SAMPLE_BYTES,
) -> None:
    """Make the directory. limit: bytes of text to train a tokenizer on at most."""
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
