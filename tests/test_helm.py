"""The Helm chart takes no secret as a value."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import jsonschema
import pytest
from pydantic import BaseModel, SecretStr
from ruamel.yaml import YAML

from relay.config import Config
from tests.programs import output_of

CHART = Path(__file__).parents[1] / "deploy/helm/imds-relay"
SCHEMA = json.loads((CHART / "values.schema.json").read_text())
ROLES = ("agent", "plain", "hub")
needs_helm = pytest.mark.skipif(shutil.which("helm") is None, reason="helm is not installed")


def render(role: str, *arguments: str) -> dict[str, Any]:
    """Return the manifests of the example of a role by kind, for the oldest Kubernetes."""
    values = f"--values={CHART}/examples/{role}.yaml"
    output_of("helm", "lint", "--strict", str(CHART), values, *arguments)
    options = ("--namespace=imds", "--kube-version=1.27.0", values, *arguments)
    text = output_of("helm", "template", f"imds-{role}", str(CHART), *options)
    if shutil.which("kubeconform"):
        output_of("kubeconform", "-strict", "-ignore-missing-schemas", given=text)
    documents = YAML(typ="safe", pure=True).load_all(text)
    return {document["kind"]: document for document in documents if document}


def pod_of(manifests: dict[str, Any]) -> Any:
    kind = "StatefulSet" if "StatefulSet" in manifests else "DaemonSet"
    return manifests[kind]["spec"]["template"]["spec"]


def merged(base: Any, changes: Any) -> Any:
    """Merge values as Helm does: mappings key by key, everything else as a whole."""
    if not isinstance(base, dict) or not isinstance(changes, dict):
        return changes
    return base | {key: merged(base.get(key), value) for key, value in changes.items()}


def is_taken(role: str, changes: Any) -> bool:
    """Whether the schema takes the example of a role with these changes."""
    files = (CHART / "values.yaml", CHART / f"examples/{role}.yaml")
    defaults, example = (YAML(typ="safe", pure=True).load(file) for file in files)
    values = merged(merged(defaults, example), changes)
    return jsonschema.Draft7Validator(SCHEMA).is_valid(values)


WRONG: tuple[tuple[str, Any], ...] = (
    ("agent", {"colour": "red"}),
    ("agent", {"image": {"repository": ""}}),
    ("agent", {"role": "hub"}),
    ("agent", {"role": "boss"}),
    ("agent", {"podMonitor": {"enabled": True, "credentials": {"secret": "a", "key": "b"}}}),
    ("agent", {"api": {"port": 80}}),
    ("agent", {"secretFiles": [{"file": "a", "value": "secret"}]}),
    ("agent", {"secretEnv": [{"name": "A", "value": "secret"}]}),
    ("plain", {"state": {"hostPath": ""}}),
    ("hub", {"podMonitor": {"enabled": True, "credentials": {"secret": "", "key": ""}}}),
    ("hub", {"config": {"fleet": {"url": "amqp://hub:password@broker/prod"}}}),
    ("hub", {"config": {"sinks": [{"kind": "teams", "url": "https://example.com/webhook"}]}}),
    ("hub", {"config": {"sinks": [{"kind": "webhook", "secrets": ["whsec_MfKQ"]}]}}),
    ("hub", {"config": {"api": {"clients": [{"name": "drain", "key": "known"}]}}}),
)


def test_wrong_values_and_secrets_among_them_are_refused() -> None:
    jsonschema.Draft7Validator.check_schema(SCHEMA)
    assert [role for role in ROLES if not is_taken(role, {})] == []
    assert [wrong for wrong in WRONG if is_taken(*wrong)] == []
    references = {
        "sinks": [{"kind": "webhook", "secrets": ["${OLD}"], "url": "https://a.example/b"}],
        "api": {"clients": [{"name": "drain", "key_file": "/run/secrets/imds-relay/key"}]},
    }
    assert is_taken("hub", {"config": references})


def test_the_schema_knows_every_secret_of_the_configuration() -> None:
    """A URL of a broker is checked by its form, as most URLs are no secrets."""
    known = set(SCHEMA["definitions"]["without-secrets"]["properties"])
    assert known == set(_secret_fields(Config, set())) - {"url"}


def _secret_fields(annotation: Any, seen: set[Any]) -> Iterator[str]:
    """Yield the names of fields that hold secrets, in a model and in those that it holds."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        if annotation in seen:
            return
        seen.add(annotation)
        for name, field in annotation.model_fields.items():
            if SecretStr.__name__ in repr(field.annotation):
                yield name
            yield from _secret_fields(field.annotation, seen)
    for part in get_args(annotation):
        yield from _secret_fields(part, seen)
