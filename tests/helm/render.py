"""Renders the chart with Helm for each role, and writes the results to rendered/.

python -m tests.helm.render

Where Helm is not installed, the tests still check the results, and that they belong to the chart:
each begins with the digest of the chart's files.
"""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

HERE = Path(__file__).parent
CHART = HERE.parent.parent / "deploy/helm/imds-relay"
ROLES = ("agent", "plain", "hub")
OLDEST_KUBERNETES = "1.27.0"
"""The oldest version that the chart admits."""


def digest() -> str:
    """Return a digest of all files of the chart."""
    files = sorted(path for path in CHART.rglob("*") if path.is_file())
    parts = (
        f"{path.relative_to(CHART)} {hashlib.sha256(path.read_bytes()).hexdigest()}\n"
        for path in files
    )
    return hashlib.sha256("".join(parts).encode()).hexdigest()


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Helm on the chart."""
    return subprocess.run(["helm", *arguments], check=False, capture_output=True, text=True)


def render(
    role: str, *settings: str, values: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Render the chart with the example of a role.

    ``values`` is a further file of values, and each of the settings an argument of `--set`.
    """
    return helm(
        "template",
        f"imds-{role}",
        str(CHART),
        "--namespace=imds",
        f"--kube-version={OLDEST_KUBERNETES}",
        f"--values={CHART / 'examples' / role}.yaml",
        *([f"--values={values}"] if values else ()),
        *(f"--set={setting}" for setting in settings),
    )


def main() -> None:
    """Write a file for each role."""
    for role in ROLES:
        rendered = render(role)
        rendered.check_returncode()
        (HERE / f"rendered/{role}.yaml").write_text(f"# chart: {digest()}\n{rendered.stdout}")


if __name__ == "__main__":
    main()
