"""The options that every command which talks to a cluster takes, spelled as kubectl spells them."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import typer

_CLUSTER = "Cluster"


class Output(str, Enum):
    """How an answer is written."""

    TABLE = "table"
    JSON = "json"
    YAML = "yaml"


Namespace = Annotated[
    str | None,
    typer.Option("-n", "--namespace", help="Namespace; default: the context's.", rich_help_panel=_CLUSTER),
]
Context = Annotated[str | None, typer.Option("--context", help="Context of the kubeconfig.", rich_help_panel=_CLUSTER)]
Kubeconfig = Annotated[
    str | None,
    typer.Option("--kubeconfig", help="Default: $KUBECONFIG, then ~/.kube/config.", rich_help_panel=_CLUSTER),
]
OutputFormat = Annotated[Output, typer.Option("-o", "--output", help="How to write the answer.")]
