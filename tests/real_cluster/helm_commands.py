"""Runs `helm install|upgrade|test|uninstall` as the docs write them, through the Helm SDK."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import helm_python
import yaml


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="helm")
    parser.add_argument("verb", choices=("install", "upgrade", "rollback", "test", "uninstall"))
    parser.add_argument("release")
    parser.add_argument("chart", nargs="?")
    parser.add_argument("--namespace", required=True)
    parser.add_argument("--create-namespace", action="store_true")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--values", action="append", default=[])
    parser.add_argument("--logs", action="store_true")
    given = parser.parse_args(words)
    values: dict[str, Any] = {}
    for path in given.values:
        values |= yaml.safe_load(Path(path).read_text())
    for entry in given.set:
        _put(values, *entry.split("=", 1))
    with helm_python.Config(kubeconfig_path=os.environ["KUBECONFIG"], namespace=given.namespace) as config:
        if given.verb == "install":
            config.install(Path(given.chart), given.release, values, create_namespace=given.create_namespace)
        elif given.verb == "upgrade":
            config.upgrade(Path(given.chart), given.release, values)
        elif given.verb == "test":
            print(config.test(given.release))
        elif given.verb == "rollback":
            config.rollback(given.release)
        else:
            config.uninstall(given.release)
    print(f"{given.verb} of {given.release}: done")
    return 0


def _put(values: dict[str, Any], path: str, value: str) -> None:
    *parents, last = path.split(".")
    for name in parents:
        values = values.setdefault(name, {})
    values[last] = {"true": True, "false": False}.get(value, value)
