"""The rooms of the pipeline, which docs/explanation/design.md describes."""

import sys

# transformers imports torchao wherever that is installed, which takes a second and prints warnings,
# for quantised models, which cannot be trained. This entry makes the import fail, until
# lib/models/float8.py removes it.
sys.modules.setdefault("torchao", None)  # type: ignore[arg-type]
