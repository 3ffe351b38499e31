"""Runs `remote`: tries a durable store out, and says or changes whose a job's folder there is."""

from __future__ import annotations

from typing import Annotated

import typer

from tiercheck_cli.checkpoint.command import Endpoint, Region
from tiercheck_cli.cluster import Cluster
from tiercheck_cli.failure import FAILED, USAGE, CannotDo
from tiercheck_cli.terminal import Context, Kubeconfig, Namespace, remark, say

remote = typer.Typer(
    no_args_is_help=True, help="Try a durable store out; say, or change, whose a job's folder there is."
)

Job = Annotated[str, typer.Argument(help="The job.")]
Place = Annotated[
    str | None,
    typer.Option(
        "--remote",
        help="s3://BUCKET/PREFIX, or the path of a shared directory. Default: what the job's spec says.",
    ),
]


@remote.command()
def check(
    place: Annotated[str, typer.Argument(help="s3://BUCKET/PREFIX, or the path of a shared directory.")],
    *,
    endpoint: Endpoint = None,
    region: Region = None,
) -> None:
    """Try out all that TierCheck relies on, with a few objects that are deleted again. Exit status 1 if
    anything fails."""
    from tiercheck_cli.checkpoint import remote as tier

    failed = 0
    with tier.refusals():
        for finding in tier.examine_place(tier.settings_of_url(place, endpoint, region)):
            mark = "skip" if not finding.tried else "ok  " if finding.ok else "FAIL"
            say(f"{mark}  {finding.name:20} {finding.message}")
            failed += not finding.ok
    if failed:
        remark(
            f"{failed} of the checks failed; what to do stands behind each. A job with this store would lose "
            "what they are for."
        )
        raise typer.Exit(FAILED)


@remote.command()
def owner(
    job: Job,
    *,
    place: Place = None,
    endpoint: Endpoint = None,
    region: Region = None,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Whose the job's folder in its store is. With --remote and -n no cluster is asked."""
    from tiercheck_cli.checkpoint import remote as tier

    if place is None or namespace is None:
        cluster = Cluster.connect(kubeconfig, context, namespace)
        namespace = cluster.namespace
    if place is not None:
        settings = tier.settings_of_url(place, endpoint, region)
    else:
        settings = tier.settings_of_job(cluster.job(job), endpoint, region)
    with tier.refusals():
        found = tier.open_store(settings, f"{namespace}/{job}").ownership.owner()
    say("nobody's yet" if found is None else found.described)


@remote.command("take-over")
def take_over(
    job: Job,
    *,
    place: Place = None,
    uid: Annotated[
        str | None,
        typer.Option(
            "--uid",
            help="The job's UID. Default: as the cluster says. With it, --remote and -n no cluster is asked.",
        ),
    ] = None,
    cluster_uid: Annotated[
        str,
        typer.Option(
            "--cluster", help="UID of its cluster's namespace kube-system, if --uid alone is not unique."
        ),
    ] = "",
    endpoint: Endpoint = None,
    region: Region = None,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Give the job its folder in the store, whoever had it. The one that had it writes nothing there any
    more."""
    from tiercheck_cli.checkpoint import remote as tier

    if uid is not None:
        if place is None or namespace is None:
            raise CannotDo(
                "--uid needs --remote and -n: without a cluster nothing else says where the folder is", USAGE
            )
        settings = tier.settings_of_url(place, endpoint, region)
    else:
        cluster = Cluster.connect(kubeconfig, context, namespace)
        namespace = cluster.namespace
        found = cluster.job(job)
        if place is not None:
            settings = tier.settings_of_url(place, endpoint, region)
        else:
            settings = tier.settings_of_job(found, endpoint, region)
        attached = (found["spec"].get("attach") or {}).get("owner") or {}
        uid = str(attached.get("uid") or found["metadata"]["uid"])  # what its pods know it by
        cluster_uid = cluster_uid or cluster.uid()
    with tier.refusals():
        former = tier.open_store(settings, f"{namespace}/{job}").ownership.give_to(uid, cluster_uid)
    if former is not None and former.job_uid == uid and cluster_uid in ("", former.cluster):
        say(f"{namespace}/{job} has it already")
        return
    say(f"{namespace}/{job}, UID {uid}, has it now")
    remark("before: " + ("nobody" if former is None else former.described))
