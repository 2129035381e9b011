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
from lib.core.paths import Experiment
from lib.models import directory
from lib.optim.registry import OPTIMIZERS
from lib.tokens import build, encode, mixture, packing, store
from lib.tokens.batches import DataStream, SampleStream
from lib.tokens.mixture import Corpus, HeldOut
from lib.tokens.order import Division
from lib.tokens.raw_shards import RawShards
from lib.tokens.raw_stream import RawDocuments, RawStream
from lib.tokens.samples import Samples, Windows
from lib.tokens.store import TokenStore
from lib.train import checks, earlier, from_scratch, streaming
from lib.train import plan as plans
from lib.train.config import AUTO, Config
from lib.train.outlook import Work
from lib.train.plan import Plan

if TYPE_CHECKING:
    import torch
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

    train: Samples | RawDocuments
    held_out: list[HeldOut]

    @property
    def samples(self) -> int | None:
        """Return the samples of an epoch, None where it has no known length."""
        return None if isinstance(self.train, RawDocuments) else len(self.train)

    @property
    def most_documents(self) -> int:
        """Return the most documents of a sample, where they are packed."""
        return 1 if isinstance(self.train, RawDocuments) else self.train.most_documents

    def stream(self, seed: int, seq_length: int, division: Division, device: torch.device,
               ) -> DataStream:
        """Return the steps of this rank; see Division for its part of each."""
        if isinstance(self.train, RawDocuments):
            return RawStream(self.train, seq_length, division, device)
        return SampleStream(self.train, seed, division, device)


def find_inputs(config: Config, experiment: Experiment, made: Path | None,
                begun: dict[str, Any]) -> Inputs:
    """Find and check model and dataset without importing torch.

    made: the model of --model-size. Without it and -m, a run that has begun keeps its model. begun:
    see Inputs. Raises UsageError or ArtifactError, telling all that is wrong at once.
    """
    stop_request = stamps.of([experiment.stop_file] * experiment.stop_file.exists())
    problems = Problems()
    name, began_with = config.model_name, begun.get("model_dir")
    if name is None and began_with and Path(began_with).is_dir():
        name = began_with
    model_dir = made or problems.collect(lambda: directory.find(name, config.cache_dir))
    corpora = [] if config.streaming else \
        problems.collect(lambda: mixture.open_corpora(config.dataset_name))
    shards = problems.collect(lambda: streaming.open_shards(config, begun)) \
        if config.streaming else None
    named = problems.collect(lambda: earlier.named_checkpoint(config, experiment))
    problems.raise_if_any()
    model_stamps = stamps.of(directory.list_files(model_dir))
    fingerprints = {"model": directory.fingerprint(model_dir),
                    "tokenizer": encode.tokenizer_fingerprint(model_dir),
                    **(streaming.identity(config, shards) if shards
                       else {"dataset": mixture.fingerprint(corpora)})}
    scratch = from_scratch.is_meant(config, model_dir, bool(begun or named))
    return Inputs(model_dir, corpora, fingerprints, begun, named, scratch, shards,
                  model_stamps, stop_request)


def settle(config: Config, inputs: Inputs) -> Config:
    """Return the options with what files decide where they are silent.

    Raises UsageError when the learning rate would rise to its minimum.
    """
    whole = inputs.begun or (inputs.named.commit() if inputs.named else {})
    batch = whole.get("identity", {}).get("options", {}).get("global_batch_size")
    if config.batch_size == AUTO and config.global_batch_size is None and batch:
        # The memory of another machine, or a new estimate, would choose another number of samples.
        config = config.settled("earlier launch", global_batch_size=batch, grad_accum_steps=None)
    for name in ("seq_length", "precision"):
        if getattr(config, name) is None and (value := inputs.begun_with(name)):
            config = config.settled("earlier launch", **{name: value})
    if config.lr is None:
        config = config.settled("weights", lr=checks.DEFAULT_LRS[inputs.scratch])
    if config.min_lr is None:
        config = config.settled("--lr", min_lr=config.lr / 10)
    checks.require_falling(config, config.lr)
    return config


def is_complete(config: Config, experiment: Experiment, inputs: Inputs) -> bool:
    """Tell whether this very run has already reached its end, and say so; takes milliseconds."""
    checkpoint = None if config.overwrite or inputs.named or config.prepare_only \
        else earlier.newest(experiment)
    if checkpoint is None:
        return False
    facts = checkpoint.commit()
    plan = make_plan(config, inputs, facts["samples_per_epoch"])
    if checkpoint.step < plan.total_steps or \
            differences(facts["identity"], plan.identity()):
        return False
    earlier.mark_complete(experiment, checkpoint.step)
    log.info(f"already done: {experiment.root} is complete at step {checkpoint.step:,}; raise "
             "--num-epochs or --max-steps to go on\n" + next_command(config, experiment))
    return True


def build_model(config: Config, experiment: Experiment, inputs: Inputs,
                ) -> tuple[Config, PreTrainedModel]:
    """Return the model on the meta device, and the options with what it and the hardware decide.

    All is checked that can be before the long work begins. Raises UsageError or ArtifactError when
    the options exceed the model, the batch cannot be divided, or the experiment's directory cannot
    be used.
    """
    from lib.models import architecture
    from lib.parallel import attention
    from lib.train import precision

    if config.precision is None:
        config = config.settled("hardware", precision="bf16" if config.plan_gpus
                                else precision.default())
    shape = architecture.read_config(inputs.model_dir, config.trust_remote_code)
    model = architecture.build_on_meta(inputs.model_dir, attention.choose(
        config.attention, config.packing, config.precision, shape), config.trust_remote_code)
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if config.seq_length is None:
        config = config.settled("model", seq_length=min(_SEQ_LENGTH, longest or _SEQ_LENGTH))
    elif longest and config.seq_length > longest:
        raise UsageError(f"--seq-length {config.seq_length} is longer than the model allows",
                         expected=f"at most {longest} (max_position_embeddings in config.json)")
    if config.precision == "fp8":
        precision.require_float8(config)
    elif config.fp8_recipe != "tensorwise":
        raise UsageError(f"--fp8-recipe {config.fp8_recipe} belongs to --precision fp8",
                         found=f"--precision {config.precision}")
    if not config.plan_gpus:  # a plan for other machines than this one, perhaps of a run there
        precision.warn_if_emulated(config.precision)
        batch = plans.divide(config, 0, plans.launched_size()).global_batch
        earlier.require_free_name(config, experiment, inputs.begun,
                                  config.identity(inputs.fingerprints, batch))
        _require_writable(experiment.root)
    return config, model


def _require_writable(directory: Path) -> None:
    """Raise UsageError when a directory can be neither written to nor made."""
    there = next(path for path in (directory, *directory.resolve().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise UsageError(f"{directory} cannot be written",
                         found=f"{there} is {'read-only' if there.is_dir() else 'a file'}",
                         hint="--save-dir DIR names another place")


def make_plan(config: Config, inputs: Inputs, samples: int | None, rank: int = 0,
              ranks: int | None = None) -> Plan:
    """Return the plan of the run; UsageError when the batch cannot be divided or data is short.

    ranks: None for those of this launch.
    """
    division = plans.divide(config, rank, ranks or plans.launched_size())
    steps = plans.total_steps(config, samples, division.global_batch)
    return Plan(config, inputs.fingerprints, division, samples, steps)


def prepare_data(config: Config, inputs: Inputs, model: PreTrainedModel) -> Data:
    """Return the samples of all corpora, making token stores and packs where they are missing.

    Must run before the process group exists: it may take hours, and no collective may time out.
    """
    if inputs.shards:
        return Data(streaming.prepare(config, inputs.shards, inputs.model_dir,
                                      model.config.get_text_config().vocab_size), [])
    stores, vocab_size = [], model.config.get_text_config().vocab_size
    for corpus in inputs.corpora:
        path = build.prepare(corpus.dataset, inputs.model_dir, config.cache_dir, vocab_size,
                             config.num_workers, not config.no_progress, verify=config.prepare_only)
        tokens = store.open_store(path, config.token_reads)
        build.require_vocabulary(tokens.vocab_size, vocab_size, inputs.model_dir)
        log.info(f"tokens: {path}, {len(tokens.splits['train'].tokens):,} for training")
        stores.append(tokens)
    return data_of(config, inputs, stores)


def work_of(config: Config, inputs: Inputs, model: PreTrainedModel) -> Work:
    """Return what an estimate of the run must know of the model."""
    from lib.train import flops

    parameters = sum(p.numel() for p in model.parameters())
    return Work(parameters, flops.per_token(model, config.seq_length),
                parameters * (_MASTER_BYTES + OPTIMIZERS[config.optimizer].state_bytes),
                inputs.scratch,
                any("validation" in corpus.dataset.splits for corpus in inputs.corpora))


def describe(plan: Plan, data: Data) -> dict[str, str]:
    """Return the derived numbers of a run, for a mixture those of each corpus too."""
    numbers = plan.total_steps * plan.division.global_batch
    return plan.describe() | data.train.describe(numbers) | _without_padding(numbers, data.train)


def _without_padding(numbers: int, train: Samples | RawDocuments) -> dict[str, str]:
    """Return how many of the tokens of so many samples are text, where that is not all of them."""
    if isinstance(train, RawDocuments):
        return {}
    labels, tokens = train.means()
    return {"without padding": f"about {numbers * tokens:,.0f} tokens, {numbers * labels:,.0f} of "
                               "them with a label"} if labels < tokens else {}


def tell_doubts(plan: Plan, work: Work, has_validation: bool) -> None:
    """Warn of options that are odd for a run of this length and a model of this size."""
    rate = checks.rate_doubt(plan.config.lr, work.parameters, work.scratch)
    for text in [*[rate] * bool(rate),
                 *checks.doubts(plan.config, plan.total_steps, has_validation)]:
        log.warn(text)


def data_of(config: Config, inputs: Inputs, stores: list[TokenStore]) -> Data:
    """Return the samples of all corpora, making the index of packs first where it is needed."""
    splits = [packing.prepare(tokens, config.seq_length) if config.packing == "documents" else
              {name: Windows(split.tokens, config.seq_length)
               for name, split in tokens.splits.items()}
              for tokens in stores]
    train = mixture.mix(inputs.corpora, [split["train"] for split in splits])
    return Data(train, mixture.held_out(inputs.corpora, train,
                                        [split.get("validation") for split in splits]))


def model_of(config: Config, inputs: Inputs) -> str:
    """Name the model of a run."""
    return f"{config.model_size} from scratch with the tokenizer of {config.tokenizer}" \
        if config.model_size else str(inputs.model_dir)


def weights_of(config: Config, inputs: Inputs) -> str:
    """Say where the first weights come from."""
    if inputs.scratch:
        return f"drawn from seed {config.seed}"
    return f"{'missing' if directory.list_missing_weights(inputs.model_dir) else 'read'} from " \
           f"{inputs.model_dir}"


def dataset_of(inputs: Inputs) -> str:
    """Name the datasets of a run with their weights."""
    return str(inputs.shards or ", ".join(map(str, inputs.corpora)))


def next_command(config: Config, experiment: Experiment) -> str:
    """Return the line that says what to type after a complete run."""
    save_dir = experiment.root.parent
    where = ["--save-dir", str(save_dir)] if str(save_dir) != "outputs" else []
    trust = ["--trust-remote-code"] if config.trust_remote_code else []
    return "next: " + commands.script("05_export_checkpoint.py", "-e", experiment.root.name, *where,
                                      *trust)
