"""The rooms of the pipeline, which docs/explanation/design.md draws."""

import sys

# transformers imports torchao wherever that is installed, which takes a second and prints warnings,
# for quantised models, which cannot be trained. Here it finds none; lib/models/float8.py does.
sys.modules.setdefault("torchao", None)  # type: ignore[arg-type]  # of Python: import fails
