"""The rooms of the pipeline; imports go down this list only.

core         offline guard, errors, options, logging, hashing, manifests, atomic publish
corpus       scan, balance, extract text, write Arrow               (imports core)
tokens       tokenise, token store, order of samples, packing       (imports core)
models       hub, resolve a name offline, from-scratch, loading     (imports core)
checkpoints  commit protocol, save, load, retention, export         (imports core, models)
train        process groups, sharding, loss, schedule, metrics      (imports all but corpus)
"""

import sys

# transformers imports torchao wherever that is installed, which takes a second and prints warnings,
# for quantised models, which cannot be trained. Here it finds none; lib/models/float8.py does.
sys.modules.setdefault("torchao", None)
