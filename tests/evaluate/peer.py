"""Score JSON Lines with lm-eval, as a script that runs in an environment of its own.

usage: peer.py MODEL SUITE OUT: a task of lm-eval for each .jsonl file, and the figures as JSON
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import lm_eval
import yaml
from lm_eval.tasks import TaskManager


def score_suite(model: str, suite: Path) -> dict[str, Any]:
    """Return accuracies, and the log-likelihoods of all choices, by task."""
    with tempfile.TemporaryDirectory() as place:
        names = []
        for path in sorted(suite.glob("*.jsonl")):
            names.append(path.stem)
            content = {
                "task": path.stem,
                "dataset_path": "json",
                "dataset_kwargs": {"data_files": str(path.resolve())},
                "output_type": "multiple_choice",
                "test_split": "train",
                "doc_to_text": "{{context}}",
                "doc_to_choice": "{{choices}}",
                "doc_to_target": "gold",
                "target_delimiter": "" if path.stem == "spaced" else " ",
                "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
            }
            Path(place, f"{path.stem}.yaml").write_text(yaml.safe_dump(content))
        evaluation = lm_eval.simple_evaluate(
            model="hf",
            model_args={"pretrained": model, "dtype": "float32"},
            tasks=names,
            task_manager=TaskManager(include_path=place, include_defaults=False),
            device="cpu",
            batch_size=4,
            bootstrap_iters=0,
            log_samples=True,
        )
    return {
        name: {
            "accuracy": evaluation["results"][name]["acc,none"],
            "accuracy_per_char": evaluation["results"][name]["acc_norm,none"],
            "nats": [
                [-float(response[0]) for response in sample["filtered_resps"]]
                for sample in sorted(evaluation["samples"][name], key=lambda s: s["doc_id"])
            ],
        }
        for name in names
    }


if __name__ == "__main__":
    model, suite, out = sys.argv[1:]
    Path(out).write_text(json.dumps(score_suite(model, Path(suite))))
