"""Check custom resources as a strict cluster would, by their schemas without unknown fields."""

from __future__ import annotations

import copy
import functools
import json
from pathlib import Path
from typing import Any

import jsonschema

CRDS = Path(__file__).parent / "crds"
_FILES = {
    "PyTorchJob": "kubeflow.org_pytorchjobs.json",
    "TrainJob": "trainer.kubeflow.org_trainjobs.json",
    "ClusterTrainingRuntime": "trainer.kubeflow.org_clustertrainingruntimes.json",
}
_METADATA = {
    "type": "object",
    "additionalProperties": False,
    "required": ["name"],
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"},
        "namespace": {"type": "string"},
        "uid": {},
        "resourceVersion": {},
        "creationTimestamp": {},
        "labels": {"type": "object", "additionalProperties": {"type": "string"}},
        "annotations": {"type": "object", "additionalProperties": {"type": "string"}},
    },
}


def find_problems(manifest: dict[str, Any]) -> list[str]:
    """Return why a cluster would refuse a custom resource, as `path: problem`."""
    validator = jsonschema.Draft202012Validator(load_schema(manifest["kind"]))
    return [
        f"{'.'.join(map(str, error.absolute_path))}: {error.message}"
        for error in sorted(validator.iter_errors(manifest), key=str)
    ]


@functools.cache
def load_schema(kind: str) -> dict[str, Any]:
    """Return the JSON schema of a kind of resource."""
    if kind == "HyperPodPyTorchJob":
        schema = json.loads((CRDS / "hyperpodpytorchjob.json").read_text())
    else:
        crd = json.loads((CRDS / _FILES[kind]).read_text())
        [version] = crd["spec"]["versions"]
        schema = make_strict(version["schema"]["openAPIV3Schema"])
        group = crd["spec"]["group"]
        schema["properties"]["apiVersion"] = {"const": f"{group}/{version['name']}"}
        schema["properties"]["kind"] = {"const": crd["spec"]["names"]["kind"]}
        schema["required"] = ["apiVersion", "kind", "metadata", "spec"]
    schema["properties"]["metadata"] = _METADATA
    schema["properties"]["status"] = {}
    return schema


def make_strict(node: Any) -> Any:
    """Return an OpenAPI schema as a JSON schema that refuses unknown fields."""
    if isinstance(node, list):
        return [make_strict(item) for item in node]
    if not isinstance(node, dict):
        return node
    schema = {
        key: {name: make_strict(value) for name, value in item.items()}
        if key == "properties"
        else make_strict(copy.deepcopy(item))
        for key, item in node.items()
    }
    if schema.pop("x-kubernetes-int-or-string", False):
        schema.pop("type", None)
        schema["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    if "properties" in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
        schema.setdefault("additionalProperties", False)
    return schema
