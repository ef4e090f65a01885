"""Writes kubernetes.json beside this file: strict schemas of the kinds that the project ships.

python -m tests.helm.make_schemas FOLDER CRD

FOLDER is api/openapi-spec/v3 of the module k8s.io/kubernetes, CRD the resource definition of
PodMonitor of the Prometheus operator. `go mod download -json <module>@<version>` says where they
are. Descriptions are left out, and unknown fields are errors.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

HERE = Path(__file__).parent
GROUPS = {
    "api__v1_openapi.json": ("ConfigMap", "Service", "ServiceAccount"),
    "apis__apps__v1_openapi.json": ("DaemonSet", "StatefulSet"),
    "apis__networking.k8s.io__v1_openapi.json": ("NetworkPolicy",),
    "apis__rbac.authorization.k8s.io__v1_openapi.json": ("ClusterRole", "ClusterRoleBinding"),
}
"""The kinds by the file that describes them."""
KEPT = {
    *("$ref", "additionalProperties", "allOf", "anyOf", "enum", "format", "items", "oneOf"),
    *("maximum", "maxLength", "minimum", "minItems", "minLength", "pattern", "properties"),
    *("required", "type"),
}


def strict(schema: Any) -> Any:
    """Return a schema without descriptions, in which unknown fields are errors."""
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    kept = {key: value for key, value in schema.items() if key in KEPT}
    if "$ref" in kept:
        return {"$ref": kept["$ref"].replace("#/components/schemas/", "#/definitions/")}
    for key in ("allOf", "anyOf", "oneOf"):
        if key in kept:
            kept[key] = [strict(part) for part in kept[key]]
    for key in ("items", "additionalProperties"):
        if key in kept:
            kept[key] = strict(kept[key])
    if "properties" in kept:
        kept["properties"] = {name: strict(part) for name, part in kept["properties"].items()}
        kept.setdefault("additionalProperties", False)
    return kept


def definitions(folder: Path) -> tuple[dict[str, str], dict[str, Any]]:
    """Return the definition of each kind, and every definition that these need."""
    kinds: dict[str, str] = {}
    found: dict[str, Any] = {}
    for name, wanted in GROUPS.items():
        everything = json.loads((folder / name).read_text())["components"]["schemas"]
        waiting = []
        for key, schema in everything.items():
            for kind in schema.get("x-kubernetes-group-version-kind", ()):
                if kind["kind"] in wanted and key.endswith(f".{kind['kind']}"):
                    version = "/".join(filter(None, (kind["group"], kind["version"])))
                    kinds[f"{version} {kind['kind']}"] = f"#/definitions/{key}"
                    waiting.append(key)
        while waiting:
            key = waiting.pop()
            if key in found:
                continue
            found[key] = strict(everything[key])
            text = json.dumps(found[key])
            waiting += [other for other in everything if f'"#/definitions/{other}"' in text]
    return kinds, found


def main() -> None:
    """Write the file."""
    kubernetes, crd = map(Path, sys.argv[1:])
    kinds, found = definitions(kubernetes)
    resource = YAML(typ="safe", pure=True).load(crd.read_text())["spec"]
    (version,) = resource["versions"]
    monitor = strict(version["schema"]["openAPIV3Schema"])
    metadata = "#/definitions/io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"
    monitor["properties"]["metadata"] = {"$ref": metadata}
    found["PodMonitor"] = monitor
    kinds[f"{resource['group']}/{version['name']} PodMonitor"] = "#/definitions/PodMonitor"
    document = {"kinds": kinds, "definitions": found}
    text = json.dumps(document, sort_keys=True, separators=(",", ":")).replace('},"', '},\n"')
    (HERE / "kubernetes.json").write_text(f"{text}\n")


if __name__ == "__main__":
    main()
