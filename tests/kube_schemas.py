"""What a cluster accepts: the schemas of the custom resources, fields they do not know refused."""

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


def problems(manifest: dict[str, Any]) -> list[str]:
    """Return what a cluster would say against a custom resource, as `path: problem`."""
    validator = jsonschema.Draft202012Validator(schema(manifest["kind"]))
    return [
        f"{'.'.join(map(str, error.absolute_path))}: {error.message}"
        for error in sorted(validator.iter_errors(manifest), key=str)
    ]


@functools.cache
def schema(kind: str) -> dict[str, Any]:
    """Return the JSON schema of a kind of resource."""
    if kind == "HyperPodPyTorchJob":
        made = json.loads((CRDS / "hyperpodpytorchjob.json").read_text())
    else:
        crd = json.loads((CRDS / _FILES[kind]).read_text())
        [version] = crd["spec"]["versions"]
        made = strict(version["schema"]["openAPIV3Schema"])
        group = crd["spec"]["group"]
        made["properties"]["apiVersion"] = {"const": f"{group}/{version['name']}"}
        made["properties"]["kind"] = {"const": crd["spec"]["names"]["kind"]}
        made["required"] = ["apiVersion", "kind", "metadata", "spec"]
    made["properties"]["metadata"] = _METADATA
    made["properties"]["status"] = {}
    return made


def strict(node: Any) -> Any:
    """Return an OpenAPI schema as JSON schema, in which an object has no unknown fields."""
    if isinstance(node, list):
        return [strict(item) for item in node]
    if not isinstance(node, dict):
        return node
    made = {
        key: {name: strict(value) for name, value in item.items()}
        if key == "properties"
        else strict(copy.deepcopy(item))
        for key, item in node.items()
    }
    if made.pop("x-kubernetes-int-or-string", False):
        made.pop("type", None)
        made["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    if "properties" in made and not made.get("x-kubernetes-preserve-unknown-fields"):
        made.setdefault("additionalProperties", False)
    return made
