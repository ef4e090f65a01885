"""A real RabbitMQ for tests: a private node that can be stopped, killed, frozen and brought back.

One directory holds everything of the node, and all its ports are on loopback. The methods block: a
test whose event loop must run calls `await asyncio.to_thread(broker.start)`.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote

from tests.certificates import AUTHORITY, SERVER
from tests.ports import listens, reserve

DEBIAN_SCRIPTS = Path("/usr/lib/rabbitmq/bin")
"""Debian's programs on PATH change to the user `rabbitmq`; these run as the caller."""

CONFIGURATION = f"""\
loopback_users = none
disk_free_limit.absolute = 50MB
log.file.level = warning
ssl_options.cacertfile = {AUTHORITY}
ssl_options.certfile = {SERVER}
ssl_options.keyfile = {SERVER}
ssl_options.verify = verify_peer
ssl_options.fail_if_no_peer_cert = false
auth_mechanisms.1 = PLAIN
auth_mechanisms.2 = EXTERNAL
ssl_cert_login_from = common_name
"""

PLUGINS = ("rabbitmq_auth_mechanism_ssl", "rabbitmq_prelaunch")
"""The only plugins that a node has to read. The other 40 took a third of the CPU time of a start.

Whatever `rabbitmq_` does not begin is a library and stays.
"""

BOOT_SECONDS = 120.0
CONNECT_SECONDS = 30.0
WAIT_SECONDS = 60.0

NODE = 'epmd & exec "$0"'
"""The node and an epmd of its own."""

GUARD = 'read _; kill -s KILL -- -"$0"'
"""Kills the node if the tests are killed, which closes their end of a pipe. It is never frozen."""


def server_scripts() -> Path | None:
    """Return the directory of `rabbitmq-server` and `rabbitmqctl`, or None without RabbitMQ.

    `RELAY_TEST_RABBITMQ` names the directory of another version, such as `sbin` of a release.
    """
    if named := os.environ.get("RELAY_TEST_RABBITMQ"):
        return Path(named)
    if (DEBIAN_SCRIPTS / "rabbitmq-server").exists():
        return DEBIAN_SCRIPTS
    path = shutil.which("rabbitmq-server")
    return Path(path).resolve().parent if path else None


class Broker:
    """One private node. Its ports and data stay the same over stop, kill and start."""

    def __init__(self, directory: Path) -> None:
        """Prepare a node in `directory`, which must exist; nothing runs before `start`."""
        scripts = server_scripts()
        if scripts is None:
            raise FileNotFoundError(
                "expected an installed RabbitMQ, found none: `make test` sees to one, or "
                "install the package rabbitmq-server"
            )
        self._scripts = scripts
        self._directory = directory
        self.port, self.tls_port, dist_port, epmd_port = reserve(4)
        self.node = f"relay-test-{self.port}@localhost"
        self._process: subprocess.Popen[bytes] | None = None
        self._guard: subprocess.Popen[bytes] | None = None
        self._frozen = False
        self._passwords = {"guest": "guest"}
        (directory / "enabled_plugins").write_text("[rabbitmq_auth_mechanism_ssl].\n")
        (directory / "rabbitmq-env.conf").touch()
        (directory / "rabbitmq.conf").write_text(
            f"{CONFIGURATION}listeners.ssl.default = 127.0.0.1:{self.tls_port}\n"
        )
        loopback = "-kernel inet_dist_use_interface {127,0,0,1}"
        self._environment = {
            "PATH": os.environ["PATH"],
            "LANG": "C.UTF-8",
            "HOME": str(directory),
            "ERL_CRASH_DUMP": str(directory / "erl_crash.dump"),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "ERL_EPMD_PORT": str(epmd_port),
            "RABBITMQ_NODENAME": self.node,
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODE_PORT": str(self.port),
            "RABBITMQ_DIST_PORT": str(dist_port),
            "RABBITMQ_CONF_ENV_FILE": str(directory / "rabbitmq-env.conf"),
            "RABBITMQ_CONFIG_FILE": str(directory / "rabbitmq.conf"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(directory / "enabled_plugins"),
            "RABBITMQ_MNESIA_BASE": str(directory / "data"),
            "RABBITMQ_LOG_BASE": str(directory / "log"),
            "RABBITMQ_PID_FILE": str(directory / "pid"),
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": f"+S 1:1 {loopback}",
            "RABBITMQ_CTL_ERL_ARGS": f"+S 1:1 {loopback}",
        }
        installed = (scripts / "rabbitmq-server").resolve().parent.parent / "plugins"
        if installed.is_dir():
            self._environment["RABBITMQ_PLUGINS_DIR"] = str(_few_plugins(installed, directory))

    def __enter__(self) -> Self:
        """Return the node; leaving kills it."""
        return self

    def __exit__(self, *_: object) -> None:
        """Kill the node; its directory can be removed then."""
        self._end(signal.SIGKILL)

    def amqp_url(self, user: str = "guest") -> str:
        """Return the URL for `user`, who is `guest` or was added with `add_user`."""
        credentials = f"{quote(user, safe='')}:{quote(self._passwords[user], safe='')}"
        return f"amqp://{credentials}@127.0.0.1:{self.port}/"

    @property
    def running(self) -> bool:
        """Whether the node's processes are there, frozen or not."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start the node with its data, if it does not run; return when it accepts AMQP and TLS."""
        if self.running:
            return
        with (self._directory / "output").open("ab") as output:
            self._process = subprocess.Popen(
                ["sh", "-c", NODE, self._scripts / "rabbitmq-server"],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # a signal to the process group reaches the whole node
            )
        self._guard = subprocess.Popen(
            ["sh", "-c", GUARD, str(self._process.pid)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        deadline = time.monotonic() + BOOT_SECONDS
        while not (self.answers() and listens(self.tls_port)):  # RabbitMQ 4 opens TLS last
            if not self.running or time.monotonic() > deadline:
                self._end(signal.SIGKILL)
                raise RuntimeError(
                    f"the RabbitMQ node did not start within {BOOT_SECONDS:.0f} s; it "
                    f"said:\n{self.output()}"
                )
            time.sleep(0.05)

    def answers(self) -> bool:
        """Whether the node answers the AMQP greeting, within half a second."""
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=0.5) as connection:
                connection.sendall(b"AMQP\x00\x00\x09\x01")
                return connection.recv(1) == b"\x01"  # a method frame: Connection.Start
        except OSError:
            return False

    def stop(self) -> None:
        """Shut the node down in order, as a service manager does: clients are told, data stays."""
        self.thaw()
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """Take the node down without a last word (SIGKILL); what was confirmed as durable stays.

        Before RabbitMQ 4 a kill loses a quorum queue that was declared within the last half second,
        with its confirmed messages (github.com/rabbitmq/ra/pull/443). So a node that is not frozen
        saves its list of queues first.
        """
        if self.running and not self._frozen:
            self.evaluate("[dets:sync(Table) || Table <- dets:all()].")
        self._end(signal.SIGKILL)

    def freeze(self) -> None:
        """Stop the processes of the node (SIGSTOP): connections stay open, nobody answers."""
        self._signal(signal.SIGSTOP)
        self._frozen = True
        # A signal needs a moment to reach every thread.
        _wait_until(lambda: not self._works(), "the node works no more after SIGSTOP")

    def thaw(self) -> None:
        if self._frozen:
            self._signal(signal.SIGCONT)
            self._frozen = False

    def heal(self) -> None:
        """Bring the node back to where a test may begin: running, thawed, without an alarm."""
        self.thaw()
        self.start()
        if self.alarmed():
            self.alarm(on=False)

    def run_commands(self, commands: str, folder: Path, **variables: str) -> str:
        """Run commands as a shell does, with `rabbitmqctl` for this node on the PATH.

        Raises:
            RuntimeError: a command failed; the text holds what it said.

        """
        variables["PATH"] = f"{self._scripts}:{os.environ['PATH']}"
        return self._run(["bash", "-euc", commands], folder, **variables)

    def forget_virtual_host(self, name: str, *users: str) -> None:
        """Delete a virtual host with everything in it, and users, if they are there."""
        self.evaluate(
            f'lists:member(<<"{name}">>, rabbit_vhost:list_names()) '
            f'andalso rabbit_vhost:delete(<<"{name}">>, <<"test">>).'
        )
        for user in users:
            self.evaluate(
                f'rabbit_auth_backend_internal:exists(<<"{user}">>) andalso '
                f'rabbit_auth_backend_internal:delete_user(<<"{user}">>, <<"test">>).'
            )

    def ctl(self, *arguments: str) -> str:
        """Run `rabbitmqctl` (about a second) and return what it printed.

        Raises:
            RuntimeError: it failed; the text holds what it said.

        """
        return self._run([str(self._scripts / "rabbitmqctl"), "--quiet", *arguments])

    def _run(self, command: list[str], cwd: Path | None = None, **variables: str) -> str:
        done = subprocess.run(
            command,
            cwd=cwd,
            env={**self._environment, **variables},
            check=False,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
        return done.stdout

    def evaluate(self, expressions: str) -> str:
        """Evaluate Erlang expressions, which end with a full stop, in the node. Return the result.

        `erl_call` takes milliseconds; without it, `rabbitmqctl eval` does the same.

        Raises:
            RuntimeError: the node does not answer, or the evaluation failed; with its output.

        """
        program = shutil.which("erl_call")
        if program is None:
            return self.ctl("eval", expressions)
        address = f"127.0.0.1:{self._environment['RABBITMQ_DIST_PORT']}"
        deadline = time.monotonic() + CONNECT_SECONDS
        while True:
            done = subprocess.run(
                [program, "-address", address, "-e"],
                input=f"{expressions}\n",
                env=self._environment,
                check=False,
                capture_output=True,
                text=True,
            )
            # Seen with Erlang 28: a running node refused a connection. It had evaluated nothing.
            refused = "failed to connect" in done.stderr
            if not refused or not self.running or time.monotonic() > deadline:
                break
            time.sleep(0.1)
        if not done.stdout.startswith("{ok, "):
            raise RuntimeError(
                f"the evaluation of {expressions} failed:\n{done.stdout}{done.stderr}"
            )
        return done.stdout.removeprefix("{ok, ").removesuffix("}")

    def add_user(self, name: str, password: str, *, tags: str = "", **rights: str) -> None:
        """Create or change a user. The rights in the virtual host `/` are regular expressions.

        ``rights``: configure, write and read, where they are not everything.
        """
        user = {"name": name, "password": password, "tags": tags}
        everything = {"configure": ".*", "write": ".*", "read": ".*"}
        permission = {"user": name, "vhost": "/", **everything, **rights}
        self.define({"users": [user], "permissions": [permission]})

    def define(self, definitions: Mapping[str, Any]) -> None:
        """Import definitions, users with plain passwords among them."""
        file = self._directory / "definitions.json"
        file.write_text(json.dumps(definitions))
        output = self.evaluate(
            f'{{ok, Definitions}} = file:read_file("{file}"), '
            f"rabbit_definitions:import_raw(Definitions)."
        )
        if output.strip() != "ok":
            raise RuntimeError(f"the import of definitions failed:\n{output}")
        self._passwords |= {
            user["name"]: user["password"]
            for user in definitions.get("users", ())
            if "password" in user
        }

    def alarm(self, *, on: bool) -> None:
        """Raise the memory alarm, which blocks every connection that publishes, or end it."""
        self.evaluate(
            f"vm_memory_monitor:set_vm_memory_high_watermark({'0.0000001' if on else '0.6'})."
        )
        # RabbitMQ 4.3 raises it a moment later.
        _wait_until(lambda: self.alarmed() == on, f"the memory alarm is {on}")

    def alarmed(self) -> bool:
        return "memory" in self.evaluate("rabbit_alarm:get_alarms().")

    def output(self) -> str:
        """Return the end of what the node printed and logged."""
        files = [self._directory / "output", *sorted((self._directory / "log").glob("*.log"))]
        return "\n".join(
            f"--- {file.name}\n{file.read_text(errors='replace')[-4000:]}"
            for file in files
            if file.exists()
        )

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, number)

    def _end(self, number: signal.Signals) -> None:
        process, self._process = self._process, None
        guard, self._guard = self._guard, None
        if process is None or guard is None:
            return
        if process.poll() is None:
            os.killpg(process.pid, number)
        process.wait(timeout=WAIT_SECONDS)
        with guard:
            guard.kill()
        self._frozen = False
        # The script may be gone an instant before the virtual machine.
        _wait_until(lambda: not listens(self.port), f"port {self.port} listens no more")

    def _works(self) -> bool:
        """Whether a thread of the node is neither stopped nor gone, as far as this system tells."""
        for file in Path("/proc").glob("[0-9]*/task/[0-9]*/stat"):
            try:
                state, _, group = file.read_text().rpartition(")")[2].split()[:3]
            except OSError:
                continue  # it has ended meanwhile
            if self._process is not None and int(group) == self._process.pid and state not in "TXZ":
                return True
        return False


def _few_plugins(installed: Path, directory: Path) -> Path:
    """Return a new folder in `directory` with links to `PLUGINS` and to the libraries."""
    folder = directory / "plugins"
    folder.mkdir()
    for plugin in installed.iterdir():
        if plugin.name.startswith(PLUGINS) or not plugin.name.startswith("rabbitmq_"):
            (folder / plugin.name).symlink_to(plugin)
    return folder


def _wait_until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError(f"expected that {what}, it is not so after {WAIT_SECONDS:.0f} s")
        time.sleep(0.01)
