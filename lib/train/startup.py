"""From options to a plan: everything that is found, checked and prepared by one process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lib.core import log, units
from lib.core.errors import UsageError
from lib.core.options import Options
from lib.core.paths import Experiment
from lib.models import identity, resolve
from lib.tokens import build, source, store
from lib.tokens.source import Source
from lib.tokens.store import TokenStore
from lib.tokens.windows import Windows
from lib.train import journal
from lib.train import plan as plans
from lib.train.plan import Plan

_SEQ_LENGTH = 1024


@dataclass(frozen=True)
class Inputs:
    """fingerprints: of model, dataset and tokenizer.

    earlier: config.yaml of the run that has left checkpoints here; empty when there is none.
    """

    model_dir: Path
    source: Source
    fingerprints: dict[str, str]
    earlier: dict[str, Any]

    def earlier_option(self, key: str) -> Any:
        """Return what an earlier launch of this experiment used, or None."""
        return self.earlier.get("identity", {}).get("options", {}).get(key)


@dataclass(frozen=True)
class Limits:
    """What the model's config and the hardware decide where the options are silent."""

    seq_length: int
    precision: str
    vocab_size: int


def find_inputs(opts: Options, experiment: Experiment) -> Inputs:
    """Find and check model and dataset without importing torch, and fill in the learning rates.

    Without -m, a run that has begun keeps its model. Raises UsageError or ArtifactError.
    """
    keeps = plans.has_begun(experiment) and not opts.overwrite
    earlier = journal.read_config(experiment) if keeps else {}
    name = opts.model_name
    began_with = earlier.get("model_dir")
    if name is None and began_with and Path(began_with).is_dir():
        name = began_with
    model_dir = resolve.resolve(name, opts.cache_dir)
    found = source.open_source(source.resolve(opts.dataset_name))
    fingerprints = {"model": identity.fingerprint(model_dir),
                    **store.identity(found, model_dir)["inputs"]}
    scratch = opts.from_scratch or not identity.has_weights(model_dir)
    opts.lr = (3e-4 if scratch else 3e-5) if opts.lr is None else opts.lr
    opts.min_lr = opts.lr / 10 if opts.min_lr is None else opts.min_lr
    plans.check_options(opts)
    return Inputs(model_dir, found, fingerprints, earlier)


def is_complete(opts: Options, experiment: Experiment, inputs: Inputs) -> bool:
    """Tell whether this very run has already reached its end, and say so; takes milliseconds."""
    state = journal.read_state(experiment)
    if not inputs.earlier or "samples" not in state or opts.prepare_only:
        return False
    limits = Limits(opts.seq_length or inputs.earlier_option("seq_length"),
                    opts.precision or inputs.earlier_option("precision"), 0)
    plan = make_plan(opts, inputs, limits, state["samples"], rank=0)
    if not plans.complete(experiment, plan.identity(), plan.total_steps):
        return False
    log.info(f"already done: {experiment.root} is complete at step {state['step']:,}; raise "
             "--num-epochs or --max-steps to go on\n" + next_command(experiment))
    return True


def check(opts: Options, inputs: Inputs) -> Limits:
    """Read the model's config and return the limits; UsageError when the options exceed them."""
    from lib.models import architecture
    from lib.train import sharding

    config = architecture.read_config(inputs.model_dir).get_text_config()
    longest = getattr(config, "max_position_embeddings", None)
    if opts.seq_length and longest and opts.seq_length > longest:
        raise UsageError(f"--seq-length {opts.seq_length} is longer than the model allows",
                         expected=f"at most {longest} (max_position_embeddings in config.json)")
    seq_length = opts.seq_length or min(_SEQ_LENGTH, longest or _SEQ_LENGTH)
    precision = opts.precision or inputs.earlier_option("precision") or sharding.default_precision()
    plans.divide(opts, 0, plans.launched_size())
    return Limits(seq_length, precision, config.vocab_size)


def make_plan(opts: Options, inputs: Inputs, limits: Limits, samples: int, rank: int) -> Plan:
    """Return the plan of the run; UsageError when the batch cannot be divided or data is short."""
    division = plans.divide(opts, rank, plans.launched_size())
    steps = plans.total_steps(opts, samples, division.global_batch)
    return Plan(opts, inputs.fingerprints, limits.seq_length, limits.precision, division, samples,
                steps)


def prepare_tokens(opts: Options, inputs: Inputs, limits: Limits) -> TokenStore:
    """Return the token store, building it first when there is none (no process group exists)."""
    path = build.prepare(inputs.source, inputs.model_dir, opts.cache_dir, limits.vocab_size,
                         opts.num_workers, not opts.no_progress)
    tokens = store.open_store(path)
    build.require_vocabulary(tokens.vocab_size, limits.vocab_size, inputs.model_dir)
    log.info(f"tokens: {path}, {len(tokens.splits['train'].tokens):,} for training")
    return tokens


def print_plan(opts: Options, inputs: Inputs, limits: Limits) -> None:
    """Print what a run would do; touches nothing."""
    from lib.models import architecture

    model = architecture.build_on_meta(inputs.model_dir)
    parameters = sum(p.numel() for p in model.parameters())
    log.info("plan:")
    log.table({"model": f"{inputs.model_dir} ({model.config.model_type}, "
                        f"{units.count(parameters)} parameters)",
               "weights": weights_of(opts, inputs), "dataset": str(inputs.source.path),
               "precision": f"float32 masters, {limits.precision} compute"})
    target = store.directory(opts.cache_dir, inputs.source,
                             store.identity(inputs.source, inputs.model_dir))
    if not target.exists():
        log.info(f"  tokens are not prepared yet ({target}): the run makes them first, or "
                 "--prepare-only; steps per epoch are known then")
        return
    train = store.open_store(target).splits["train"]
    samples = len(Windows(train.tokens, limits.seq_length))
    log.table(make_plan(opts, inputs, limits, samples, rank=0).describe())


def weights_of(opts: Options, inputs: Inputs) -> str:
    """Say where the first weights come from."""
    if opts.from_scratch or not identity.has_weights(inputs.model_dir):
        return f"drawn from seed {opts.seed}"
    return f"read from {inputs.model_dir}"


def require_free_name(opts: Options, experiment: Experiment, plan: Plan, inputs: Inputs) -> None:
    """Raise when the experiment's directory holds something that this run cannot go on from."""
    if opts.overwrite:
        return
    if inputs.earlier:
        plans.require_same(inputs.earlier.get("identity", {}), plan.identity(), experiment.root)
        if opts.resume == "never":
            raise UsageError(f"{experiment.root} has been trained already, and --resume is never",
                             run="use another --experiment-name, or --overwrite")
    elif plans.has_begun(experiment) or (
            not experiment.config.exists() and experiment.root.exists()
            and any(experiment.root.iterdir())):
        raise UsageError(f"{experiment.root} exists and is no experiment (no readable config.yaml)",
                         run="use another --experiment-name, or --overwrite to move it aside")


def next_command(experiment: Experiment) -> str:
    """Return the line that says what to type after a complete run."""
    save_dir = experiment.root.parent
    where = f" --save-dir {save_dir}" if str(save_dir) != "outputs" else ""
    return f"next: python 05_export_checkpoint.py -e {experiment.root.name}{where}"
