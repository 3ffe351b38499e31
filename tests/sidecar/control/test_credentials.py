"""No report and no log of a sidecar holds its credentials, and it follows those that change.

A Secret that is mended after the pod started reaches the sidecar without a new pod.
"""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.sidecar.stations import Stations
from tests.sidecar.world import MakeWorld, until
from tiercheck.protocol import names
from tiercheck.protocol.directive import Tier
from tiercheck.protocol.report import (
    Quarantined,
    RankFailure,
    RankRestore,
    RemoteReport,
    RestoreReport,
    RestoreState,
    TrainerReport,
    TrainerState,
)
from tiercheck.protocol.version import Version
from tiercheck.redaction import log_redacted
from tiercheck_sidecar import app
from tiercheck_sidecar.control.report import Reporter, own_credentials
from tiercheck_sidecar.remote.config import clean_credentials
from tiercheck_sidecar.remote.errors import RemoteError

WORD = "plain letters only".replace(" ", "")
"""Nothing tells it from a word, but that it is held here."""
LOOKS = "gh" + "p_" + "0f9a" * 9


def test_own_credentials_are_known_by_their_variables_and_the_jobs_token(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("the-token-of-the-job\n")
    env = {
        names.ENV_CREDENTIALS_DIR: str(tmp_path),
        "AWS_SECRET_ACCESS_KEY": f"{WORD}\n",
        "AWS_WEB_IDENTITY_TOKEN_FILE": "/var/run/token",
        "PWD": "/workspace",
        "AWS_REGION": "eu-central-1",
        "AWS_SESSION_TOKEN": "none",
    }
    assert own_credentials(env) == {WORD, "the-token-of-the-job"}


def test_report_holds_no_credential_in_any_of_its_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", WORD)
    station = Stations(tmp_path, workers=1)[0]
    reporter, version = Reporter(station.state, station.vault), Version(3, 1)
    said = f"refused {WORD} and {LOOKS}"
    state = station.state
    state.problem("RemoteOther", said)
    state.remote = RemoteReport(True, False, said, (version,))
    state.quarantine(Quarantined(0, version, 1, said))
    tried = RankRestore(0, Tier.REMOTE, None, 0, 1.0, (said,))
    state.restore = RestoreReport(RestoreState.FAILED, version, (tried,))
    ended = TrainerReport(
        TrainerState.FAILED, 1, message=said, failure=RankFailure(0, "Error", said, 1), unhealthy=said
    )
    monkeypatch.setattr(type(state.trainer), "report", property(lambda _: ended))
    report = reporter.report()
    assert WORD not in repr(report)
    assert LOOKS not in repr(report)
    assert report.problems[0].message == "refused REDACTED and REDACTED"
    assert report.restore.ranks[0].failures == ("refused REDACTED and REDACTED",)
    assert report.trainer.state is TrainerState.FAILED
    assert (report.job_uid, report.remote.versions) == (state.config.job_uid, (version,))
    assert reporter.report().serial == report.serial, "what is hidden is no news"


def test_log_holds_no_credential_not_even_in_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    written, root = io.StringIO(), logging.getLogger()
    monkeypatch.setattr("sys.stderr", written)
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(root, "level", root.level)
    monkeypatch.setattr("sys.excepthook", sys.excepthook)
    monkeypatch.setattr("threading.excepthook", threading.excepthook)
    log_redacted(known={WORD})
    try:
        raise ValueError(f"Invalid header value b'{LOOKS}'")
    except ValueError:
        logging.getLogger("any.library").exception("signing with %s failed", WORD)
    shown = written.getvalue()
    assert WORD not in shown
    assert LOOKS not in shown
    assert "signing with REDACTED failed" in shown
    assert "ValueError" in shown


def test_traceback_of_what_nobody_caught_holds_no_credential(tmp_path: Path) -> None:
    script = (
        "import sys, threading; from tiercheck.redaction import log_redacted; "
        "log_redacted(known={sys.argv[1]})\n"
        "def fail(): raise ValueError(sys.argv[1] + ' ' + sys.argv[2])\n"
        "thread = threading.Thread(target=fail, name='lane'); thread.start(); thread.join(); fail()"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script, WORD, LOOKS], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 1
    assert "thread lane ended unexpectedly" in ran.stderr
    assert "the process ends unexpectedly" in ran.stderr
    assert ran.stderr.count("ValueError: REDACTED REDACTED") == 2
    assert WORD not in ran.stderr
    assert LOOKS not in ran.stderr


def test_line_break_around_a_credential_is_left_out_and_the_log_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    env = {
        "AWS_SESSION_TOKEN": f"{WORD}\n",
        "AWS_ACCESS_KEY_ID": " id",
        "AWS_REGION": "eu-central-1",
        "OTHER": " x ",
    }
    clean_credentials(env)
    assert env == {
        "AWS_SESSION_TOKEN": WORD, "AWS_ACCESS_KEY_ID": "id", "AWS_REGION": "eu-central-1", "OTHER": " x "
    }  # fmt: skip
    assert "AWS_SESSION_TOKEN has blanks or a line break around its value" in caplog.text
    assert WORD not in caplog.text


@pytest.mark.parametrize("middle", ["\n", " ", "\x00", "\u00e9"])
def test_credential_that_no_header_can_hold_is_refused_by_name_and_not_shown(middle: str) -> None:
    with pytest.raises(RemoteError, match="AWS_SECRET_ACCESS_KEY") as refusal:
        clean_credentials({"AWS_SECRET_ACCESS_KEY": f"{WORD}{middle}more"})
    assert WORD not in str(refusal.value)


def put(folder: Path, **values: str) -> None:
    """As the kubelet does: a new folder, and one link that is exchanged at once."""
    version = folder / f"..{len(list(folder.iterdir()))}"
    version.mkdir()
    for key, value in values.items():
        (version / key).write_text(value)
    fresh = folder / "..fresh"
    fresh.symlink_to(version.name)
    os.replace(fresh, folder / "..data")
    for key in values:
        if not (folder / key).is_symlink():
            (folder / key).symlink_to(f"..data/{key}")


def test_fingerprint_follows_contents_and_not_the_kubelets_housekeeping(tmp_path: Path) -> None:
    assert app.fingerprint(tmp_path) == app.fingerprint(tmp_path / "missing")
    empty = app.fingerprint(tmp_path)
    put(tmp_path, KEY="a")
    first = app.fingerprint(tmp_path)
    put(tmp_path, KEY="a")
    assert app.fingerprint(tmp_path) == first != empty
    put(tmp_path, KEY="b")
    assert app.fingerprint(tmp_path) != first


async def test_changed_credentials_do_not_disturb_a_remote_tier_that_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "_LOOK_EVERY", 0.01)
    reachable, asked = True, asyncio.Event()

    def answer() -> bool:
        asked.set()
        return reachable

    waiting = asyncio.create_task(app.wait_for_renewal([tmp_path], answer))
    await asked.wait()
    put(tmp_path, KEY="a")
    for _ in range(3):
        asked.clear()
        await asked.wait()
    assert not waiting.done()
    reachable = False
    async with asyncio.timeout(30):
        await waiting


@pytest.mark.parametrize("what", ["credentials", "authorities"])
def test_sidecar_with_old_or_no_credentials_or_authorities_ends_when_new_ones_appear(
    what: str, make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world()
    mounted = world.root / "mounted"
    mounted.mkdir()
    remote = {"bucket": "b", "endpoint": "https://127.0.0.1:9"}
    if what == "credentials":
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv(names.ENV_REMOTE_CREDENTIALS_DIR, str(mounted))
        new = {"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "key"}
    else:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "key")
        put(mounted, **{"ca.crt": "-----BEGIN CERTIFICATE-----"})
        remote["caBundle"], new = f"{mounted}/ca.crt", {"ca.crt": "-----BEGIN CERTIFICATE-----\nnew"}
    world.remote = json.dumps({"s3": remote})
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/dev/null")
    world.start()
    until(lambda: world.report(0).remote.reachable is False, "the sidecar misses its remote tier")
    process = world._processes.pop(0)
    put(mounted, **new)
    assert process.wait(40) == 0
    assert "credentials have changed" in world.logs(0)
