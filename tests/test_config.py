"""The configuration: how it is found, read, overridden and checked, and its error messages."""

from __future__ import annotations

import re
import string
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import SecretStr

from relay.cli.init import initial_configuration
from relay.config import AGENT_EXAMPLE, DEFAULTS, Config, load, load_kinds
from relay.errors import ConfigError
from relay.fleet.settings import AgentSettings

ROOT = Path(__file__).parent.parent
SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSwMfKQ9r8GKYo="
CLIENT_SECRET = "whsec_AfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSwMfKQ9r8GKYo="
DIGEST = "ab" * 32
TEAMS_URL = "https://default0f3c.1a.environment.api.powerplatform.com/powerautomate/automations/direct/workflows/0f/triggers/manual?sig=x"
FOR_EXAMPLES = {
    "MATTERMOST_TOKEN": "token",
    "MATTERMOST_SECRET": SECRET,
    "SLACK_TOKEN": "xoxb-1234567890-of-nothing",
    "SLACK_APP_TOKEN": "xapp-1-A0APP-of-nothing",
    "GOTIFY_TOKEN": "secret",
    "TEAMS_URL": TEAMS_URL,
    "DRAIN_SECRET": SECRET,
    "DRAIN_PASSWORD": "secret",
    "DB_DRAIN_SECRET": CLIENT_SECRET,
    "DB_DRAIN_KEY_SHA256": DIGEST,
    "ENTRA_CLIENT_SECRET": "fake~entra~client~secret~of~forty~chars~1",
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "relay.yaml"


def load_text(file: Path, text: str, environment: Mapping[str, str] | None = None) -> Config:
    file.write_text(text, encoding="utf-8", errors="surrogateescape")
    return load(file, environment or {}).config


def error_of(file: Path, text: str, environment: Mapping[str, str] | None = None) -> str:
    """Return the error of an invalid text, without the name of the file."""
    with pytest.raises(ConfigError) as error:
        load_text(file, text, environment)
    return "\n".join(
        line.removeprefix(f"{file}:").removeprefix(" ") for line in str(error.value).splitlines()
    )


def with_examples(text: str) -> str:
    """Return the text with every example uncommented, in place of the [], {} or null above it.

    The example of sign_in needs a public URL.
    """
    text = text.replace("public_url: null ", "public_url: https://relay.example.com ")
    lines: list[str] = []
    within = False
    for line in text.splitlines():
        match = re.fullmatch(r"( *)# ( {2}.*)", line)
        if match and not within:
            lines[-1] = re.sub(r"^( *\w+:) (\[\]|\{\}|null) ", r"\1 ", lines[-1])
        lines.append(match[1] + match[2] if match else line)
        within = match is not None
    return "\n".join(lines)


# --- defaults


def test_the_shipped_document_is_the_defaults_field_by_field() -> None:
    assert load(Path(str(DEFAULTS)), {}).config == Config()
    assert load(environment={}).config == Config()


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(DEFAULTS.read_text(), id="defaults"),
        pytest.param(initial_configuration(), id="init"),
    ],
)
def test_every_example_in_the_shipped_documents_works(file: Path, text: str) -> None:
    config = load_text(file, with_examples(text), FOR_EXAMPLES)
    assert {getattr(sink, "kind", None) for sink in config.sinks} == set(load_kinds().modules)
    assert config.api.tls is not None
    assert config.approvals.amqp is not None


def test_the_shipped_document_names_every_setting() -> None:
    text = DEFAULTS.read_text()
    schema = Config.model_json_schema()
    sections = [section.get("properties", {}) for section in (schema, *schema["$defs"].values())]
    keys = set[str]()
    for section in sections:
        keys |= {*section} - {f"{key}_file" for key in section}  # the files of secrets
    assert len(keys) > 80
    assert [key for key in keys if not re.search(rf"\b{key}:.*#", text)] == []


def test_what_init_prints_for_an_agent_is_one_with_the_defaults(file: Path, tmp_path: Path) -> None:
    secret = tmp_path / "broker-url"
    secret.write_text("amqps://vmss-a:secret@broker.example.com/prod")
    text = AGENT_EXAMPLE.read_text().replace("/etc/imds-relay/broker-url", str(secret))
    config = load_text(file, text)
    assert isinstance(config.fleet, AgentSettings)
    unchanged = {"scope", "relay", "source", "sinks", "approvals", "telemetry"}
    assert config.model_dump(include=unchanged) == Config().model_dump(include=unchanged)
    defaults = AgentSettings(role="agent", url=SecretStr("amqps://a:b@broker.example.com"))
    kept = {"exchange", "hub_user"}
    assert config.fleet.model_dump(include=kept) == defaults.model_dump(include=kept)


def test_what_init_prints_approves_what_users_start_and_is_else_the_defaults(file: Path) -> None:
    config = load_text(file, initial_configuration())
    (rule,) = config.approvals.rules
    assert (rule.match.event_source, rule.approve) == (("User",), "automatic")
    no_rules = config.approvals.model_copy(update={"rules": ()})
    assert config.model_copy(update={"approvals": no_rules}) == Config()
    assert Config().has_no_rule_for_user_events
    assert not config.has_no_rule_for_user_events


# --- where it is found


def test_the_document_is_that_of_the_option_else_of_the_variable_else_of_a_usual_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("option", "variable", "relay"):
        (tmp_path / f"{name}.yaml").write_text(f"scope: {name}")
    variable = {"IMDS_RELAY_CONFIG": str(tmp_path / "variable.yaml")}
    assert load(tmp_path / "option.yaml", variable).config.scope == "option"
    assert load(environment=variable).config.scope == "variable"
    loaded = load(environment={})
    assert (loaded.config.scope, loaded.file) == ("relay", Path("relay.yaml"))


# --- variables and files


def test_variables_are_filled_in_and_two_dollars_are_one(file: Path) -> None:
    text = (
        "scope: ${WHERE}-${N}\napi: {public_url: 'https://a/$${x}$$'}\nsource: &same "
        "{interval: '${N}s'}\nstore: {retain: '${N}d'}\n"
    )
    config = load_text(file, text, {"WHERE": "west", "N": "2"})
    assert (config.scope, config.source.interval) == ("west-2", 2.0)
    assert config.store.retain == 2 * 86400.0
    assert config.api.public_url == "https://a/${x}$"


def test_a_part_that_is_used_twice_is_filled_in_once_each_time(file: Path) -> None:
    text = f"""
sinks:
  - &first {{kind: webhook, name: a, url: "https://a/$$b", secrets: ["{SECRET}"]}}
  - {{<<: *first, name: b}}
"""
    assert [sink.reveal("url") for sink in load_text(file, text).sinks] == ["https://a/$b"] * 2


def test_the_environment_wins_over_the_document(file: Path) -> None:
    environment = {
        "IMDS_RELAY_SCOPE": "from-environment",
        "IMDS_RELAY_SOURCE__INTERVAL": "3s",
        "IMDS_RELAY_APPROVALS__ENABLED": "false",
        "IMDS_RELAY_API__SOCKET": "null",
        "IMDS_RELAY_SINKS": (
            f'[{{"kind": "webhook", "name": "x", "url": "https://x", "secrets": ["{SECRET}"]}}]'
        ),
        "IMDS_RELAY_STORE__RETAIN": "1d",
        "IMDS_RELAY_STORE": '{"path": "/x"}',
        "IMDS_RELAY_URL": "the command line's own",
        "IMDS_RELAY_KEY": "likewise",
        "OTHER": "none of ours",
    }
    text = "scope: from-document\nsource: {interval: 1s, timeout: 7s}\napi: {socket: /run/x}\n"
    config = load_text(file, text, environment)
    assert config.scope == "from-environment"
    assert (config.source.interval, config.source.timeout) == (3.0, 7.0)
    assert (config.approvals.enabled, config.api.socket) == (False, None)
    assert (config.store.path, config.store.retain) == (Path("/x"), 86400.0)
    assert [sink.name for sink in config.sinks] == ["x"]


def test_secrets_come_from_files_and_follow_them(file: Path, tmp_path: Path) -> None:
    url, secrets = tmp_path / "url", tmp_path / "secrets"
    url.write_text("https://a.example/x\n")
    secrets.write_text(f"{SECRET}\n\n{SECRET}\n")
    config = load_text(
        file, f"sinks: [{{kind: webhook, name: a, url_file: {url}, secrets_file: {secrets}}}]"
    )
    sink = config.sinks[0]
    assert sink.reveal("url") == "https://a.example/x"
    assert sink.reveal_list("secrets") == (SECRET, SECRET)
    url.write_text("https://b.example/longer")
    assert sink.reveal("url") == "https://b.example/longer"
    url.unlink()  # it is being replaced
    assert sink.reveal("url") == "https://b.example/longer"


@pytest.mark.parametrize(
    ("content", "problem"),
    [(b" \n", "expected a secret in the file, it is empty"), (b"\xff", "it is not UTF-8 text")],
)
def test_a_secret_file_without_a_secret_is_refused(
    file: Path, tmp_path: Path, content: bytes, problem: str
) -> None:
    (tmp_path / "secrets").write_bytes(content)
    sink = f"{{kind: webhook, name: a, url: 'https://a', secrets_file: {tmp_path}/secrets}}"
    message = error_of(file, f"sinks: [{sink}]")
    assert message.startswith("1: sinks[0].secrets_file: expected")
    assert problem in message


# --- what is wrong


def wrong_configurations() -> Iterator[tuple[str, str]]:
    """Yield each document or variable of the list with what is said about it, behind =>."""
    for case in re.findall(
        r"((?:(?!=> ).*\n)+)((?:=> .*\n)+)",
        (ROOT / "tests/wrong_configurations.txt").read_text(encoding="utf-8"),
    ):
        yield case[0].rstrip("\n"), case[1].removeprefix("=> ").rstrip("\n").replace("\n=> ", "\n")


WRONG = [
    *wrong_configurations(),
    (
        "source: {interval: " + "9" * 400 + "s}",
        "1: source.interval: expected a duration such as 500ms, 1s, 5m, 2h or 7d; got text",
    ),
    ("scope: \x07", "expected YAML, got a character that YAML does not allow"),
    (r'scope: "\U99999999"', "expected YAML, got a character that YAML does not allow"),
    ("a: " + "[" * 500, "expected YAML with less nesting"),
    (r'store: {path: "a\0b"}', "1: store.path: expected text without null characters"),
    ("scope: 0x" + "f" * 6000, "1: scope: expected a smaller number"),
    ("scope: \udcff", "expected UTF-8 text: invalid start byte at byte 7"),
]


@pytest.mark.parametrize(("text", "message"), WRONG, ids=[message for _, message in WRONG])
def test_what_is_wrong_is_refused_in_exact_words(file: Path, text: str, message: str) -> None:
    variables = dict([text.split("=", 1)]) if text.startswith("IMDS_RELAY_") else {}
    document = "" if variables else text.replace("SECRET", SECRET)
    assert error_of(file, document, variables) == message


@pytest.mark.parametrize("number", ["0", "12", "007", "1.5", "0.001"])
@pytest.mark.parametrize(
    ("unit", "seconds"), [("ms", 0.001), ("s", 1.0), ("m", 60.0), ("h", 3600.0), ("d", 86400.0)]
)
def test_a_duration_has_number_and_unit(file: Path, number: str, unit: str, seconds: float) -> None:
    store = load_text(file, f"store: {{retain: {number}{unit}}}").store
    assert store.retain == pytest.approx(float(number) * seconds)


def test_a_usual_place_that_cannot_be_looked_into_is_not_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that is too long is as unreadable as a closed folder, also for root."""
    place = tmp_path / ("x" * 300) / "relay.yaml"
    monkeypatch.setattr("relay.config.DEFAULT_PATHS", (place,))
    with pytest.raises(
        ConfigError, match=r"relay\.yaml: expected a file that can be read: File name too long"
    ):
        load(environment={})


# --- never a secret

BROKEN = [
    *(ROOT / "tests/misplaced_secrets.txt").read_text(encoding="utf-8").splitlines(),
    "? {key: SECRET}\n: 1\n? {key: SECRET}\n: 2",
]


# Hypothesis also draws words of the source code, such as names of keys. The prefix makes no word.
SECRETS = st.text(string.ascii_letters + string.digits + "-_", min_size=10, max_size=58).map(
    "q9".__add__
)


@pytest.mark.parametrize("text", BROKEN)
@given(secret=SECRETS)
@example(secret="hunter2-hunter2")
@settings(max_examples=15)
def test_no_error_shows_a_secret(
    tmp_path_factory: pytest.TempPathFactory, text: str, secret: str
) -> None:
    file = tmp_path_factory.getbasetemp() / "broken.yaml"
    assert secret not in error_of(file, text.replace("SECRET", secret).replace("GOOD", SECRET))


@pytest.mark.parametrize(
    "value",
    [
        '[{"name": "a", "key": ["SECRET"]}]',
        '[{"name": "a", "key": "SECRET"',
        '{"SECRET": 1}',
        "SECRET",
        '[{"name": "a", "secrets": "SECRET"}]',
    ],
    ids=["list in place of text", "unfinished JSON", "mapping", "text", "secret that is no secret"],
)
def test_no_error_about_a_variable_shows_a_secret(value: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(environment={"IMDS_RELAY_API__CLIENTS": value.replace("SECRET", "hunter2-hunter2")})
    assert "hunter2-hunter2" not in str(error.value)


def test_a_configuration_that_is_printed_shows_no_secret(file: Path) -> None:
    config = load_text(file, with_examples(DEFAULTS.read_text()), FOR_EXAMPLES)
    assert SECRET not in repr(config)
    assert SECRET not in config.model_dump_json()
    assert "guest:guest" not in repr(config) + config.model_dump_json()
    assert isinstance(config.api.clients[0].secrets[0], SecretStr)


def test_a_file_of_the_environment_replaces_a_secret_of_the_document(tmp_path: Path) -> None:
    """The environment wins, whichever of x and x_file it gives."""
    secret = tmp_path / "url"
    secret.write_text("amqp://guest:guest@127.0.0.1:5672/\n", encoding="utf-8")
    file = tmp_path / "relay.yaml"
    url = "url: 'amqp://a:b@127.0.0.1/'"
    bus = f"{{kind: rabbitmq, name: bus, {url}}}"
    file.write_text(f"sinks: [{bus}]\napprovals: {{amqp: {{{url}}}}}\n")
    amqp = load(file, {"IMDS_RELAY_APPROVALS__AMQP__URL_FILE": str(secret)}).config.approvals.amqp
    assert amqp is not None
    assert (amqp.url, amqp.reveal("url")) == (None, "amqp://guest:guest@127.0.0.1:5672/")
