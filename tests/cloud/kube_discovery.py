"""Answer the requests by which kubectl finds out what an API server knows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.cloud.kube_server import Type

Object = dict[str, Any]

_SHORT_NAMES = {"persistentvolumeclaims": ["pvc"], "persistentvolumes": ["pv"]}
_VERBS = ["get", "list", "create", "patch", "update", "delete", "watch"]


def answer_discovery(known: Sequence[Type], path: str) -> Object | None:
    """Return the answer to a request for discovery; None if it is for something else."""
    groups = sorted({type_.group_version for type_ in known} - {"v1"})
    if path == "version":
        return {"major": "1", "minor": "34", "gitVersion": "v1.34.0"}
    if path == "api":
        return {"kind": "APIVersions", "versions": ["v1"]}
    if path == "apis":
        versions = [{"groupVersion": name, "version": name.split("/")[1]} for name in groups]
        return {
            "kind": "APIGroupList",
            "apiVersion": "v1",
            "groups": [
                {
                    "name": version["groupVersion"].split("/")[0],
                    "versions": [version],
                    "preferredVersion": version,
                }
                for version in versions
            ],
        }
    if path == "openapi/v3":
        return {
            "paths": {
                type_.root: {"serverRelativeURL": f"/openapi/v3/{type_.root}"} for type_ in known
            }
        }
    root = path.removeprefix("openapi/v3/")
    types = [type_ for type_ in known if type_.root == root]
    if path.startswith("openapi/v3/"):
        return _openapi_paths(types)
    if not types:
        return None
    return {
        "kind": "APIResourceList",
        "apiVersion": "v1",
        "groupVersion": types[0].group_version,
        "resources": [
            {
                "name": type_.plural,
                "singularName": type_.kind.lower(),
                "kind": type_.kind,
                "namespaced": type_.namespaced,
                "verbs": _VERBS,
                "shortNames": _SHORT_NAMES.get(type_.plural, []),
            }
            for type_ in types
        ],
    }


def _openapi_paths(types: Sequence[Type]) -> Object:
    """Return the part of OpenAPI by which kubectl sees that the server validates fields."""
    paths = {}
    for type_ in types:
        group, _, version = type_.group_version.rpartition("/")
        scope = "namespaces/{namespace}/" if type_.namespaced else ""
        paths[f"/{type_.root}/{scope}{type_.plural}/{{name}}"] = {
            "patch": {
                "parameters": [
                    {"name": "fieldValidation", "in": "query"},
                    {"name": "dryRun", "in": "query"},
                ],
                "responses": {"200": {"description": "OK"}},
                "x-kubernetes-group-version-kind": {
                    "group": group,
                    "version": version,
                    "kind": type_.kind,
                },
            }
        }
    return {"openapi": "3.0.0", "info": {"title": "Kubernetes", "version": "v1"}, "paths": paths}
