"""Builds the three images as a user does, with `make images`, over a base of Debian's packages.

Everything lies in one folder: buildah's store, with its layers for the next time, and the log of the build.
`python -m tests.images.building FOLDER` leaves the images in FOLDER, in files that `ctr images import` takes.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

ROOT = Path(__file__).parents[2]
CACHE = ROOT / ".images"
SUITE = "bookworm"
BASE = f"localhost/tiercheck-python:{SUITE}"
"""Stands for the official image of Python, which is in a registry that not everybody reaches."""
PACKAGES = ("python3", "python3-venv", "ca-certificates")
TARGETS = ("operator", "sidecar", "example-trainer")

_MOST_KEPT = 12 * 2**30
"""Bytes of old layers, after which the store begins anew."""
_PIP_SETTINGS = (
    "index-url",
    "extra-index-url",
    "find-links",
    "cert",
    "trusted-host",
    "proxy",
    "default-timeout",
)

Say = Callable[[str], None]


@dataclass(frozen=True)
class Config:
    """What an image says of itself."""

    entrypoint: tuple[str, ...]
    env: dict[str, str]
    user: str
    cwd: str


class Store:
    """buildah with `folder` as the only place that it writes to."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".gitignore").write_text("*\n")
        self._settings = folder / "storage.conf"
        self._choose("overlay")
        if self._run("info").returncode != 0:
            self._choose("vfs")  # works everywhere, and copies every layer

    @property
    def environment(self) -> dict[str, str]:
        """For whoever runs buildah."""
        return {**os.environ, "CONTAINERS_STORAGE_CONF": str(self._settings), "BUILDAH_ISOLATION": "chroot"}

    def buildah(self, *arguments: str) -> str:
        """What it prints. Raises AssertionError with what it complains of."""
        done = self._run(*arguments)
        assert done.returncode == 0, f"buildah {' '.join(arguments)}: {done.stderr}"
        return done.stdout.strip()

    def has(self, image: str) -> bool:
        return self._run("inspect", "--type", "image", image).returncode == 0

    def config(self, image: str) -> Config:
        found: dict[str, Any] = json.loads(self.buildah("inspect", "--type", "image", image))["OCIv1"][
            "config"
        ]
        return Config(
            tuple(found.get("Entrypoint") or found.get("Cmd") or ()),
            dict(pair.split("=", 1) for pair in found.get("Env") or ()),
            found.get("User", ""),
            found.get("WorkingDir") or "/",
        )

    @contextmanager
    def mounted(self, image: str) -> Iterator[Path]:
        """Its root file system."""
        container = self.buildah("from", "--pull-never", image)
        try:
            yield Path(self.buildah("mount", container))
        finally:
            self.buildah("rm", container)

    def _choose(self, driver: str) -> None:
        self._settings.write_text(
            f'[storage]\ndriver = "{driver}"\ngraphroot = "{self.folder}/store"\nrunroot = '
            f'"{self.folder}/run"\n'
        )

    def _run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = ["buildah", *arguments]
        return subprocess.run(command, env=self.environment, capture_output=True, text=True, check=False)


def image_name(target: str, tag: str) -> str:
    return f"docker.io/library/tiercheck-{target}:{tag}"


def make_base(store: Store, say: Say) -> None:
    """A small Debian with its Python, unless the store has it. A store that has grown too large begins
    anew.
    """
    if int(_output(["du", "--summarize", "--block-size=1", str(store.folder)]).split()[0]) > _MOST_KEPT:
        store.buildah("rmi", "--all", "--force")
    if store.has(BASE):
        return
    say(f"making {BASE} (debootstrap)")
    with tempfile.TemporaryDirectory(dir=store.folder) as name:
        folder = Path(name)
        debootstrap = [
            "debootstrap",
            "--variant=minbase",
            f"--include={','.join(PACKAGES)}",
            SUITE,
            str(folder / "base"),
        ]
        _logged(debootstrap, store.folder / "base.log")
        for rest in (
            "var/cache/apt",
            "var/lib/apt/lists",
            "usr/share/doc",
            "usr/share/man",
            "usr/share/locale",
        ):
            shutil.rmtree(folder / "base" / rest, ignore_errors=True)
        (folder / "Containerfile").write_text(
            "FROM scratch\nCOPY base /\nENV PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin\nCMD "
            '["python3"]\n'
        )
        store.buildah("build", "--file", f"{folder}/Containerfile", "--tag", BASE, str(folder))


def build_images(store: Store, say: Say) -> None:
    """`make images` in a copy of what git knows of this tree: what it needs beyond that is missed."""
    with tempfile.TemporaryDirectory(dir=store.folder) as name:
        copy = Path(name, "source")
        copy_tree(copy)
        log = store.folder / "build.log"
        say(f"building {', '.join(TARGETS)} (log: {log})")
        _logged(["make", "--directory", str(copy), "images"], log, builder_environment(store, Path(name)))


def builder_environment(store: Store, folder: Path) -> dict[str, str]:
    """Of a person whose `make images` takes our base, and gets its packages as this machine does. `folder`:
    there as long as it is used."""
    settings = folder / "pip.conf"
    lines, places = pip_settings()
    settings.write_text("[global]\n" + "".join(f"{line}\n" for line in lines))
    volumes = [f"--volume={place}:{place}:ro" for place in places] + [f"--volume={settings}:/etc/pip.conf:ro"]
    return {**store.environment, "BUILDER": "buildah", "PYTHON_IMAGE": BASE, "BUILD_FLAGS": " ".join(volumes)}


def write_archives(store: Store, folder: Path, targets: Sequence[str] = TARGETS) -> None:
    """`make images-archive`: one file for each image, for `ctr images import`."""
    variables = ["BUILDER=buildah", f"OUT={folder}", f"IMAGES={' '.join(targets)}"]
    _logged(
        ["make", "--directory", str(ROOT), "images-archive", *variables],
        store.folder / "archive.log",
        store.environment,
    )


def copy_tree(target: Path) -> None:
    """Every file of the work tree that git does not ignore."""
    listed = _output(["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"])
    for name in listed.split("\0"):
        if name and (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def pip_settings() -> tuple[list[str], list[str]]:
    """Lines of a pip.conf with what pip is told here, and the folders and files that they name."""
    found: dict[str, str] = {}
    for line in _output([sys.executable, "-m", "pip", "config", "list"]).splitlines():
        name, _, value = line.partition("=")
        key = name.rpartition(".")[2]
        if key in _PIP_SETTINGS and (key not in found or name.startswith(":env:")):
            found[key] = value.strip("'\"")
    places = {place for value in found.values() for word in value.split() for place in _places(word)}
    return [f"{key} = {value}" for key, value in found.items()], sorted(places)


def _places(word: str) -> Iterator[str]:
    if word.startswith("file:"):
        index = Path(url2pathname(urlsplit(word).path))
        yield str(index.parent)  # an index refers to files beside it
    elif word.startswith("/"):
        yield word


def _logged(command: Sequence[str], log: Path, environment: dict[str, str] | None = None) -> None:
    """Raises AssertionError with the end of the log."""
    began = time.monotonic()
    with log.open("w") as output:
        code = subprocess.run(
            command, env=environment, stdout=output, stderr=subprocess.STDOUT, check=False
        ).returncode
        output.write(f"\n{time.monotonic() - began:.0f} s\n")
    if code != 0:
        lines = [line for line in log.read_text().splitlines() if not re.match(r"^(warning|level=)", line)]
        raise AssertionError(f"{command[0]} failed; the end of {log}:\n" + "\n".join(lines[-30:]))


def _output(command: Sequence[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def main() -> None:
    store = Store(CACHE)
    make_base(store, print)
    build_images(store, print)
    write_archives(store, Path(sys.argv[1]).absolute())


if __name__ == "__main__":
    main()
