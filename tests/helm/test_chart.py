"""The Helm chart renders what Kubernetes takes, without rights and without secrets.

Where Helm is installed, the chart is linted and rendered anew. Elsewhere the committed results are
checked, and that they belong to this very chart.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, get_args

import jsonschema
import pytest
from pydantic import BaseModel, SecretStr
from ruamel.yaml import YAML

from relay.config import Config, load
from tests.helm.render import CHART, HERE, ROLES, digest, helm, render

SCHEMAS = json.loads((HERE / "kubernetes.json").read_text())
HAS_HELM = shutil.which("helm") is not None


def parse(text: str) -> Any:
    """Parse one YAML document."""
    return YAML(typ="safe", pure=True).load(text)


def parse_all(text: str) -> list[Any]:
    """Parse the YAML documents of a text, without empty ones."""
    documents = YAML(typ="safe", pure=True).load_all(text)
    return [document for document in documents if document]


def check_manifest(manifest: Any) -> None:
    """Raise ValidationError if Kubernetes would not take a manifest, or would ignore a field."""
    kind = SCHEMAS["kinds"][f"{manifest['apiVersion']} {manifest['kind']}"]
    schema = {"$ref": kind, "definitions": SCHEMAS["definitions"]}
    jsonschema.Draft202012Validator(schema).validate(manifest)


def committed(role: str) -> list[Any]:
    """Return the manifests of a role."""
    return parse_all((HERE / f"rendered/{role}.yaml").read_text())


def manifest_of(role: str, kind: str) -> Any:
    """Return the only manifest of a kind."""
    (found,) = (manifest for manifest in committed(role) if manifest["kind"] == kind)
    return found


def pod_of(role: str) -> Any:
    """Return the specification of the pods of a role."""
    return manifest_of(role, "StatefulSet" if role == "hub" else "DaemonSet")["spec"]["template"][
        "spec"
    ]


def relay_of(role: str) -> Any:
    """Return the container of the relay."""
    (container,) = pod_of(role)["containers"]
    return container


@pytest.mark.parametrize("role", ROLES)
def test_the_committed_manifests_are_those_of_the_chart(role: str) -> None:
    """`python -m tests.helm.render` writes them anew."""
    text = (HERE / f"rendered/{role}.yaml").read_text()
    assert text.splitlines()[0] == f"# chart: {digest()}"
    if HAS_HELM:
        rendered = render(role)
        assert rendered.returncode == 0, rendered.stderr
        assert parse_all(rendered.stdout) == parse_all(text)


@pytest.mark.parametrize("role", ROLES)
def test_the_linter_of_helm_finds_nothing(role: str) -> None:
    """Without Helm, the schema of the values is applied, which is the most that it checks."""
    if HAS_HELM:
        result = helm("lint", "--strict", str(CHART), f"--values={CHART}/examples/{role}.yaml")
        assert result.returncode == 0, result.stdout
    check_values(values_of(role))


@pytest.mark.parametrize("role", ROLES)
def test_kubernetes_takes_every_manifest_and_ignores_no_field(role: str) -> None:
    manifests = committed(role)
    assert len(manifests) >= 3
    for manifest in manifests:
        check_manifest(manifest)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("spec", "template", "spec", "hostNetwrok"), True),
        (("spec", "template", "spec", "containers", 0, "ports", 0, "containerPort"), "8080"),
        (("spec", "selector"), None),
    ],
)
def test_the_check_of_manifests_finds_mistakes(path: tuple[Any, ...], value: object) -> None:
    manifest = copy.deepcopy(manifest_of("agent", "DaemonSet"))
    parent = manifest
    for step in path[:-1]:
        parent = parent[step]
    parent[path[-1]] = value
    with pytest.raises(jsonschema.ValidationError):
        check_manifest(manifest)


# --- what runs


@pytest.mark.parametrize("role", ROLES)
def test_the_relay_has_no_rights_and_a_root_that_cannot_be_written(role: str) -> None:
    pod, container = pod_of(role), relay_of(role)
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] == 10001
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert pod["automountServiceAccountToken"] is False
    kinds = {manifest["kind"] for manifest in committed(role)}
    assert not {kind for kind in kinds if "Role" in kind}
    assert "Secret" not in kinds


@pytest.mark.parametrize("role", ROLES)
def test_the_probes_ask_where_the_relay_listens(role: str) -> None:
    container = relay_of(role)
    variables = {entry["name"]: entry.get("value") for entry in container["env"]}
    host, _, port = variables["IMDS_RELAY_API__LISTEN"].partition(":")
    for probe, path in (
        ("startupProbe", "/healthz"),
        ("livenessProbe", "/healthz"),
        ("readinessProbe", "/readyz"),
    ):
        asked = container[probe]["httpGet"]
        assert (asked["path"], asked["port"], asked["scheme"]) == (path, int(port), "HTTP")
        assert (host, asked.get("host")) in {("0.0.0.0", None), ("127.0.0.1", "127.0.0.1")}


def test_agents_and_plain_relays_use_the_network_of_the_node_and_a_hub_does_not() -> None:
    """The metadata service answers the node itself."""
    for role in ("agent", "plain"):
        assert pod_of(role)["hostNetwork"] is True
        assert pod_of(role)["dnsPolicy"] == "ClusterFirstWithHostNet"
    assert "hostNetwork" not in pod_of("hub")


def test_there_is_one_hub_and_its_state_outlives_its_pod() -> None:
    hub = manifest_of("hub", "StatefulSet")["spec"]
    assert hub["replicas"] == 1
    (claim,) = hub["volumeClaimTemplates"]
    assert claim["metadata"]["name"] == "state"
    assert hub["persistentVolumeClaimRetentionPolicy"]["whenDeleted"] == "Retain"
    mounts = {mount["name"]: mount["mountPath"] for mount in relay_of("hub")["volumeMounts"]}
    variables = {entry["name"]: entry.get("value") for entry in relay_of("hub")["env"]}
    assert Path(variables["IMDS_RELAY_STORE__PATH"]).parent == Path(mounts["state"])


def test_nobody_leads_the_hub_to_a_metadata_service_and_few_may_call_it() -> None:
    policy = manifest_of("hub", "NetworkPolicy")["spec"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    (ingress,) = policy["ingress"]
    assert ingress["from"]
    assert ingress["ports"] == [{"port": "api", "protocol": "TCP"}]
    everywhere = [
        peer["ipBlock"] for rule in policy["egress"] for peer in rule.get("to", ()) if peer
    ]
    assert {"169.254.0.0/16", "168.63.129.16/32"} <= set(everywhere[0]["except"])


def test_prometheus_finds_the_port_and_the_key() -> None:
    (endpoint,) = manifest_of("hub", "PodMonitor")["spec"]["podMetricsEndpoints"]
    (port,) = relay_of("hub")["ports"]
    assert endpoint["port"] == port["name"]
    assert endpoint["path"] == "/metrics"
    assert endpoint["authorization"]["credentials"] == {"name": "imds-hub-prometheus", "key": "key"}


@pytest.mark.parametrize("role", ROLES)
def test_the_relay_takes_the_configuration_of_its_config_map(role: str, tmp_path: Path) -> None:
    text = manifest_of(role, "ConfigMap")["data"]["relay.yaml"]
    variables = {
        entry["name"]: entry.get("value", "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSwMfKQ9r8GKYo=")
        for entry in relay_of(role)["env"]
    }
    (volume,) = (entry for entry in pod_of(role)["volumes"] if entry["name"] == "secrets")
    for source in volume["projected"]["sources"]:
        for item in source["secret"]["items"]:
            assert f"/run/secrets/imds-relay/{item['path']}" in text
            is_url = item["path"].endswith("-url")
            secret = "amqps://user:pw@broker.example.com/prod" if is_url else f"{'k' * 40}\n"
            (tmp_path / item["path"]).write_text(secret)
    file = tmp_path / "relay.yaml"
    file.write_text(text.replace("/run/secrets/imds-relay", str(tmp_path)))
    loaded = load(file, variables).config
    assert str(loaded.store.path) == "/var/lib/imds-relay/relay.db"
    assert str(loaded.api.socket) == "/run/imds-relay/relay.sock"
    assert (loaded.fleet.role if loaded.fleet else "plain") == role


# --- values


def merged(base: Any, changes: Any) -> Any:
    """Merge values as Helm does: mappings key by key, everything else as a whole."""
    if not isinstance(base, dict) or not isinstance(changes, dict):
        return changes
    return base | {key: merged(base.get(key), value) for key, value in changes.items()}


def values_of(role: str) -> Any:
    """Return the values of the chart with those of an example."""
    return merged(
        parse((CHART / "values.yaml").read_text()),
        parse((CHART / f"examples/{role}.yaml").read_text()),
    )


def check_values(values: Any) -> None:
    """Raise ValidationError if the schema of the values does not take them."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    jsonschema.Draft7Validator.check_schema(schema)
    jsonschema.Draft7Validator(schema).validate(values)


WRONG = (
    ("agent", {"colour": "red"}),
    ("agent", {"image": {"repository": ""}}),
    ("agent", {"role": "hub"}),
    ("agent", {"role": "plain"}),
    ("agent", {"role": "boss"}),
    ("agent", {"config": {"fleet": {"role": "hub"}}}),
    ("agent", {"podMonitor": {"enabled": True, "credentials": {"secret": "a", "key": "b"}}}),
    ("agent", {"api": {"port": 80}}),
    ("agent", {"secretFiles": [{"file": "a/b", "secret": "c", "key": "d"}]}),
    ("agent", {"secretFiles": [{"file": "a", "value": "secret"}]}),
    ("agent", {"secretEnv": [{"name": "A", "value": "secret"}]}),
    ("plain", {"state": {"hostPath": ""}}),
    ("plain", {"config": {"fleet": {"role": "agent"}}}),
    ("hub", {"podMonitor": {"enabled": True, "credentials": {"secret": "", "key": ""}}}),
    ("hub", {"config": {"fleet": {"url": "amqp://hub:password@broker/prod"}}}),
    ("hub", {"config": {"sinks": [{"kind": "teams", "url": "https://example.com/webhook"}]}}),
    ("hub", {"config": {"sinks": [{"kind": "webhook", "secrets": ["whsec_MfKQ"]}]}}),
    ("hub", {"config": {"sinks": [{"kind": "webhook", "basic": {"password": "known"}}]}}),
    ("hub", {"config": {"api": {"clients": [{"name": "drain", "key": "known"}]}}}),
)


@pytest.mark.parametrize(("role", "changes"), WRONG)
def test_wrong_values_and_secrets_among_them_are_refused(role: str, changes: Any) -> None:
    with pytest.raises(jsonschema.ValidationError):
        check_values(merged(values_of(role), changes))
    if HAS_HELM:
        rendered = render(role, *(f"{path}={value}" for path, value in _leaves("", changes)))
        assert rendered.returncode != 0, rendered.stdout


def _leaves(path: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield each value of a mapping in the notation of `helm --set`."""
    entries: Iterable[tuple[str, Any]]
    if isinstance(value, dict):
        entries = ((f"{path}.{key}".removeprefix("."), part) for key, part in value.items())
    elif isinstance(value, list):
        entries = ((f"{path}[{index}]", part) for index, part in enumerate(value))
    else:
        yield path, str(value).lower() if isinstance(value, bool) else str(value)
        return
    for name, part in entries:
        yield from _leaves(name, part)


def test_secrets_by_reference_are_taken() -> None:
    references = {
        "sinks": [
            {"kind": "teams", "url": "${TEAMS_URL}"},
            {"kind": "webhook", "secrets": ["${OLD}", "${NEW}"], "url": "https://a.example/b"},
        ],
        "api": {"clients": [{"name": "drain", "key_file": "/run/secrets/imds-relay/key"}]},
    }
    check_values(merged(values_of("hub"), {"config": references}))


def test_the_schema_knows_every_secret_of_the_configuration() -> None:
    """A URL of a broker is checked by its form, as most URLs are no secrets."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    known = set(schema["definitions"]["without-secrets"]["properties"])
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
