"""From options to a plan: everything that is found, checked and prepared by one process."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lib.checkpoints.commit import Checkpoint
from lib.core import commands, log, stamps
from lib.core.errors import Problems, UsageError
from lib.core.identity import differences
from lib.core.options import Options
from lib.core.paths import Experiment
from lib.models import directory
from lib.optim.registry import OPTIMIZERS
from lib.tokens import build, encode, mixture, packing, store
from lib.tokens.mixture import Corpus, HeldOut
from lib.tokens.raw_shards import RawShards
from lib.tokens.samples import Samples
from lib.tokens.store import TokenStore
from lib.tokens.streaming import Stream
from lib.tokens.windows import Windows
from lib.train import checks, earlier, from_scratch, streaming
from lib.train import plan as plans
from lib.train.outlook import Work
from lib.train.plan import Plan

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_SEQ_LENGTH = 1024
_MASTER_BYTES = 4  # of a parameter, in a checkpoint


@dataclass(frozen=True)
class Inputs:
    """fingerprints: of model, dataset and tokenizer. shards: of --streaming, instead of corpora.

    begun: what the run that has left checkpoints here was begun with; empty when there is none.
    named: the checkpoint that --resume names. scratch: the first weights are drawn from the seed.
    model_stamps: of the model's files, from before its fingerprint. stop_request: of the stop file
    that lay there when this launch began.
    """

    model_dir: Path
    corpora: list[Corpus]
    fingerprints: dict[str, str]
    begun: dict[str, Any]
    named: Checkpoint | None
    scratch: bool
    shards: RawShards | None = None
    model_stamps: stamps.Stamps = field(default_factory=dict)
    stop_request: stamps.Stamps = field(default_factory=dict)

    def begun_with(self, option: str) -> Any:
        """Return the value of an option that the run was begun with, or None."""
        return self.begun.get("identity", {}).get("options", {}).get(option)


@dataclass(frozen=True)
class Data:
    """What a run learns from, and what its validation loss is measured on."""

    train: Samples | Stream
    held_out: list[HeldOut]

    @property
    def samples(self) -> int | None:
        """Return the samples of an epoch, None where it has no known length."""
        return None if isinstance(self.train, Stream) else len(self.train)

    @property
    def most_documents(self) -> int:
        """Return the most documents of a sample, where they are packed."""
        return 1 if isinstance(self.train, Stream) else self.train.most_documents


@dataclass(frozen=True)
class Setting:
    """What the model and the hardware decide where the options are silent.

    model: on the meta device, not yet sharded. auto_batch: --batch-size was auto.
    """

    model: PreTrainedModel
    seq_length: int
    precision: str
    auto_batch: bool = False

    @property
    def vocab_size(self) -> int:
        return self.model.config.get_text_config().vocab_size


def find_inputs(opts: Options, experiment: Experiment, made: Path | None) -> Inputs:
    """Find and check model and dataset without importing torch, and fill in the learning rates.

    made: the model of --model-size. Without it and -m, a run that has begun keeps its model.
    Raises UsageError or ArtifactError, telling all that is wrong at once.
    """
    stop_request = stamps.of([experiment.stop_file] * experiment.stop_file.exists())
    problems, begun = Problems(), {} if opts.overwrite else earlier.read(experiment)
    problems.collect(lambda: streaming.check_options(opts))
    problems.collect(lambda: plans.check_options(opts))
    problems.collect(lambda: checks.require_sane(opts, bool(begun)))
    problems.raise_if_any()
    name, began_with = opts.model_name, begun.get("model_dir")
    if name is None and began_with and Path(began_with).is_dir():
        name = began_with
    model_dir = made or problems.collect(lambda: directory.find(name, opts.cache_dir))
    corpora = [] if opts.streaming else \
        problems.collect(lambda: mixture.open_corpora(opts.dataset_name))
    shards = problems.collect(lambda: streaming.open_shards(opts, begun)) \
        if opts.streaming else None
    named = problems.collect(lambda: earlier.named_checkpoint(opts, experiment))
    problems.raise_if_any()
    model_stamps = stamps.of(directory.list_files(model_dir))
    fingerprints = {"model": directory.fingerprint(model_dir),
                    "tokenizer": encode.tokenizer_fingerprint(model_dir),
                    **(streaming.identity(opts, shards) if shards
                       else {"dataset": mixture.fingerprint(corpora)})}
    whole = begun or (named.commit() if named else {})
    plans.remember_batch(opts, whole.get("identity", {}).get("options", {})
                         .get("global_batch_size"))
    scratch = from_scratch.is_meant(opts, model_dir, bool(begun or named))
    opts.lr = (plans.LR_FROM_SCRATCH if scratch else plans.LR) if opts.lr is None else opts.lr
    opts.min_lr = opts.lr / 10 if opts.min_lr is None else opts.min_lr
    plans.require_falling(opts, opts.lr)
    return Inputs(model_dir, corpora, fingerprints, begun, named, scratch, shards,
                  model_stamps, stop_request)


def is_complete(opts: Options, experiment: Experiment, inputs: Inputs) -> bool:
    """Tell whether this very run has already reached its end, and say so; takes milliseconds."""
    checkpoint = None if opts.overwrite or inputs.named or opts.prepare_only \
        else earlier.newest(experiment)
    if checkpoint is None:
        return False
    facts = checkpoint.commit()
    plan = make_plan(opts, inputs, opts.seq_length or inputs.begun_with("seq_length"),
                     opts.precision or inputs.begun_with("precision"), facts["samples_per_epoch"])
    if checkpoint.step < plan.total_steps or \
            differences(facts["identity"], plan.identity()):
        return False
    earlier.mark_complete(experiment, checkpoint.step)
    log.info(f"already done: {experiment.root} is complete at step {checkpoint.step:,}; raise "
             "--num-epochs or --max-steps to go on\n" + next_command(opts, experiment))
    return True


def check(opts: Options, experiment: Experiment, inputs: Inputs) -> Setting:
    """Build the model on the meta device and check all that can be before the long work begins.

    Raises UsageError or ArtifactError when the options exceed the model, the batch cannot be
    divided, or the experiment's directory cannot be used.
    """
    from lib.models import architecture
    from lib.parallel import attention
    from lib.train import precision

    compute = opts.precision or inputs.begun_with("precision") \
        or ("bf16" if opts.plan_gpus else precision.default())
    config = architecture.read_config(inputs.model_dir, opts.trust_remote_code)
    model = architecture.build_on_meta(inputs.model_dir, attention.choose(
        opts.attention, opts.packing, compute, config), opts.trust_remote_code)
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if opts.seq_length and longest and opts.seq_length > longest:
        raise UsageError(f"--seq-length {opts.seq_length} is longer than the model allows",
                         expected=f"at most {longest} (max_position_embeddings in config.json)")
    seq_length = opts.seq_length or inputs.begun_with("seq_length") \
        or min(_SEQ_LENGTH, longest or _SEQ_LENGTH)
    if compute == "fp8":
        precision.require_float8(opts, seq_length)
    elif opts.fp8_recipe != "tensorwise":
        raise UsageError(f"--fp8-recipe {opts.fp8_recipe} belongs to --precision fp8",
                         found=f"--precision {compute}")
    if not opts.plan_gpus:  # a plan for other machines than this one, perhaps of a run there
        precision.warn_if_emulated(compute)
        batch = plans.divide(opts, 0, plans.launched_size()).global_batch
        earlier.require_free_name(opts, experiment, inputs.begun, plans.identity(
            opts, inputs.fingerprints, seq_length, compute, batch))
        _require_writable(experiment.root)
    return Setting(model, seq_length, compute, opts.batch_size == plans.AUTO)


def _require_writable(directory: Path) -> None:
    """Raise UsageError when a directory can be neither written to nor made."""
    there = next(path for path in (directory, *directory.resolve().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise UsageError(f"{directory} cannot be written",
                         found=f"{there} is {'read-only' if there.is_dir() else 'a file'}",
                         hint="--save-dir DIR names another place")


def make_plan(opts: Options, inputs: Inputs, seq_length: int, precision: str,
              samples: int | None, rank: int = 0, ranks: int | None = None) -> Plan:
    """Return the plan of the run; UsageError when the batch cannot be divided or data is short.

    ranks: None for those of this launch.
    """
    division = plans.divide(opts, rank, ranks or plans.launched_size())
    steps = plans.total_steps(opts, samples, division.global_batch)
    return Plan(opts, inputs.fingerprints, seq_length, precision, division, samples, steps)


def prepare_data(opts: Options, inputs: Inputs, setting: Setting) -> Data:
    """Return the samples of all corpora, making token stores and packs where they are missing.

    Must run before the process group exists: it may take hours, and no collective may time out.
    """
    if inputs.shards:
        return Data(streaming.prepare(opts, inputs.shards, inputs.model_dir, setting.vocab_size),
                    [])
    stores = []
    for corpus in inputs.corpora:
        path = build.prepare(corpus.source, inputs.model_dir, opts.cache_dir, setting.vocab_size,
                             opts.num_workers, not opts.no_progress, verify=opts.prepare_only)
        tokens = store.open_store(path, opts.token_reads)
        build.require_vocabulary(tokens.vocab_size, setting.vocab_size, inputs.model_dir)
        log.info(f"tokens: {path}, {len(tokens.splits['train'].tokens):,} for training")
        stores.append(tokens)
    return data_of(opts, inputs, stores, setting.seq_length)


def work_of(opts: Options, inputs: Inputs, setting: Setting) -> Work:
    """Return what an estimate of the run must know of the model."""
    from lib.train import flops

    parameters = sum(p.numel() for p in setting.model.parameters())
    return Work(parameters, flops.per_token(setting.model, setting.seq_length),
                parameters * (_MASTER_BYTES + OPTIMIZERS[opts.optimizer].state_bytes),
                inputs.scratch,
                any("validation" in corpus.source.splits for corpus in inputs.corpora))


def describe(plan: Plan, data: Data) -> dict[str, str]:
    """Return the derived numbers of a run, for a mixture those of each corpus too."""
    numbers = plan.total_steps * plan.division.global_batch
    return plan.describe() | data.train.describe(numbers) | _without_padding(numbers, data.train)


def _without_padding(numbers: int, train: Samples | Stream) -> dict[str, str]:
    """Return how many of the tokens of so many samples are text, where that is not all of them."""
    if isinstance(train, Stream):
        return {}
    labels, tokens = train.means()
    return {"without padding": f"about {numbers * tokens:,.0f} tokens, {numbers * labels:,.0f} of "
                               "them with a label"} if labels < tokens else {}


def tell_doubts(plan: Plan, work: Work, has_validation: bool) -> None:
    """Warn of options that are odd for a run of this length and a model of this size."""
    rate = checks.rate_doubt(plan.options.lr, work.parameters, work.scratch)
    for text in [*[rate] * bool(rate),
                 *checks.doubts(plan.options, plan.total_steps, has_validation)]:
        log.warn(text)


def data_of(opts: Options, inputs: Inputs, stores: list[TokenStore], seq_length: int) -> Data:
    """Return the samples of all corpora, making the index of packs first where it is needed."""
    splits = [packing.prepare(tokens, seq_length) if opts.packing == "documents" else
              {name: Windows(split.tokens, seq_length) for name, split in tokens.splits.items()}
              for tokens in stores]
    train = mixture.mix(inputs.corpora, [split["train"] for split in splits])
    return Data(train, mixture.held_out(inputs.corpora, train,
                                        [split.get("validation") for split in splits]))


def model_of(opts: Options, inputs: Inputs) -> str:
    """Name the model of a run."""
    return f"{opts.model_size} from scratch with the tokenizer of {opts.tokenizer}" \
        if opts.model_size else str(inputs.model_dir)


def weights_of(opts: Options, inputs: Inputs) -> str:
    """Say where the first weights come from."""
    if inputs.scratch:
        return f"drawn from seed {opts.seed}"
    return f"{'missing' if directory.list_missing_weights(inputs.model_dir) else 'read'} from " \
           f"{inputs.model_dir}"


def dataset_of(inputs: Inputs) -> str:
    """Name the datasets of a run with their weights."""
    return str(inputs.shards or ", ".join(map(str, inputs.corpora)))


def next_command(opts: Options, experiment: Experiment) -> str:
    """Return the line that says what to type after a complete run."""
    save_dir = experiment.root.parent
    where = ["--save-dir", str(save_dir)] if str(save_dir) != "outputs" else []
    trust = ["--trust-remote-code"] if opts.trust_remote_code else []
    return "next: " + commands.script("05_export_checkpoint.py", "-e", experiment.root.name, *where,
                                      *trust)
