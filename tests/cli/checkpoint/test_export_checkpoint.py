"""Promise: torch and Hugging Face's tools read what a job saved, and begin one with theirs."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from tests.cli.shown import Ran, run
from tests.lives import Lives
from tiercheck import Checkpointer
from tiercheck.dcp import Storage
from tiercheck.protocol.artifacts.contents import Chunk, WholeTensor
from tiercheck.protocol.artifacts.pieces import Box
from tiercheck_cli.checkpoint.remote import settings_of_job, settings_of_url
from tiercheck_cli.checkpoint.saved import SavedArtifact, open_folder, read_box, slabs
from tiercheck_cli.failure import CannotDo

ROOT = Path(__file__).parents[3]
RANKS = ROOT / "tests" / "trainer" / "restore" / "mesh_changes.py"
WIDE = 1301


def export(folder: Path, form: str, to: Path, *more: str) -> Ran:
    return run("export", "--folder", str(folder), "--format", form, "--to", str(to), *more)


def import_(source: Path, form: str, to: Path, *more: str) -> Ran:
    return run("import", "--from", str(source), "--format", form, "--to", str(to), *more)


def model_of_the_run() -> nn.Sequential:
    """As that of `matrix_runs.Run` without a quirk."""
    sizes = (9, 34, WIDE, 34, WIDE, 30)
    layers = [part for pair in itertools.pairwise(sizes) for part in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


@pytest.fixture(scope="module")
def sharded(lives: Lives, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What four ranks saved, FSDP on each half, replicated between them: tensors in shares and shards."""
    folder = tmp_path_factory.mktemp("run")
    lives.run(["torch.distributed.fsdp", "tiercheck"], [RANKS, folder, "fsdp:4", "hybrid:4"], ranks=4)
    return folder / "checkpoints"


@pytest.fixture(scope="module")
def restored(
    sharded: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The same version, as one rank restores it."""
    model = model_of_the_run()
    optimizer = optimizer_of_the_run(model)
    state = {"position": {"samples": 0}}
    with Checkpointer(model, optimizer, folder=sharded, state=state, run=RANKS.name) as checkpointer:
        assert checkpointer.restore() == 4
    return model, optimizer


def optimizer_of_the_run(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def equal(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name


def test_exported_as_safetensors_the_weights_are_those_that_a_restore_brings(
    sharded: Path, restored: tuple[nn.Module, Any], tmp_path: Path
) -> None:
    ran = export(sharded, "safetensors", tmp_path / "hf").well()
    assert [path.name for path in (tmp_path / "hf").iterdir()] == ["model.safetensors"]
    equal(load_file(tmp_path / "hf" / "model.safetensors"), restored[0].state_dict())
    assert "step 4" in ran.err


def test_large_models_come_in_several_files_with_an_index(
    sharded: Path, restored: tuple[nn.Module, Any], tmp_path: Path
) -> None:
    to = tmp_path / "hf"
    export(sharded, "safetensors", to, "--shard-size", "160KB").well()
    index = json.loads((to / "model.safetensors.index.json").read_text())
    found: dict[str, torch.Tensor] = {}
    for file in sorted(set(index["weight_map"].values())):
        here = load_file(to / file)
        assert {index["weight_map"][name] for name in here} == {file}
        found |= here
    assert len(set(index["weight_map"].values())) > 1
    equal(found, dict(restored[0].state_dict()))
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())


def test_exported_as_dcp_torch_alone_loads_model_and_optimizer(
    sharded: Path, restored: tuple[nn.Module, torch.optim.Optimizer], tmp_path: Path
) -> None:
    export(sharded, "dcp", tmp_path / "plain").well()
    torch.manual_seed(7)
    model = model_of_the_run()
    optimizer = optimizer_of_the_run(model)
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments}
    dcp.load(state, checkpoint_id=tmp_path / "plain")
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    equal(dict(model.state_dict()), dict(restored[0].state_dict()))
    for mine, theirs in zip(model.parameters(), restored[0].parameters(), strict=True):
        equal(optimizer.state[mine], restored[1].state[theirs])
    assert optimizer.param_groups[0]["lr"] == restored[1].param_groups[0]["lr"]


def test_what_is_corrupt_is_not_exported(sharded: Path, tmp_path: Path) -> None:
    copy = tmp_path / "checkpoints"
    shutil.copytree(sharded, copy)
    slot = next(copy.glob("rank-3-of-4/*4-0.safetensors"))
    content = bytearray(slot.read_bytes())
    content[-70_000] ^= 1
    slot.write_bytes(content)
    ran = export(copy, "safetensors", tmp_path / "hf", "--prefix", "")
    assert ran.status == 1
    assert "is corrupt at byte" in ran.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints"]


@pytest.mark.parametrize("suffix", [".json", ".safetensors", ""])
@pytest.mark.parametrize("put", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_folder_with_a_pipe_or_a_link_is_a_sentence_at_once(
    tmp_path: Path, suffix: str, put: Callable[[Path], None]
) -> None:
    rank = tmp_path / "run" / "rank-0-of-1"
    rank.mkdir(parents=True)
    (rank / f"{12:012d}-1.safetensors").write_bytes(b"x")
    (rank / f"{12:012d}-1.json").write_text(json.dumps({"size": 1, "chunk": 1, "crc32": [1]}))
    if suffix:
        path = rank / f"{12:012d}-1{suffix}"
        path.unlink()
        put(path)
    else:
        rank.rename(tmp_path / "elsewhere")
        rank.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CannotDo, match="no plain file"):
        open_folder(tmp_path / "run", None)


def test_what_cannot_be_done_is_a_sentence(sharded: Path, tmp_path: Path) -> None:
    def said(*words: str) -> str:
        ran = run("export", *words)
        assert ran.status > 0
        return ran.err

    to = ("--to", str(tmp_path / "new"))
    assert "one of JOB, --folder and --remote" in said("--format", "dcp", *to)
    assert "--format dcp or safetensors" in said("--folder", str(sharded), *to)
    assert "no complete version of step 7; there are 2, 4" in said(
        "--folder", str(sharded), "--format", "dcp", "--step", "7", *to
    )
    assert "is there already" in said("--folder", str(sharded), "--format", "dcp", "--to", str(sharded))
    assert "give --prefix one of model, optimizer0" in said(
        "--folder", str(sharded), "--format", "safetensors", "--prefix", "ema", *to
    )
    assert "is no size" in said(
        "--folder", str(sharded), "--format", "safetensors", "--shard-size", "big", *to
    )
    assert "--remote needs --job" in said("--remote", "s3://bucket/x", "--format", "dcp", *to)
    assert "which job?" in said()
    assert not (tmp_path / "new").exists()


def test_what_torch_saved_through_us_is_exported_as_torch_would_have_saved_it(tmp_path: Path) -> None:
    state = {"model": {"w": torch.arange(6.0).view(2, 3)}, "epoch": 3, "list": [torch.ones(2), "text"]}
    with Storage(tmp_path / "checkpoints") as storage:
        assert storage.save(state, 5)
    export(tmp_path / "checkpoints", "dcp", tmp_path / "ours").well()
    dcp.save(state, checkpoint_id=tmp_path / "theirs")
    ours, theirs = (dcp.FileSystemReader(tmp_path / each).read_metadata() for each in ("ours", "theirs"))
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert ours.planner_data == theirs.planner_data
    loaded = {"model": {"w": torch.zeros(2, 3)}, "epoch": 0, "list": [torch.zeros(2), ""]}
    dcp.load(loaded, checkpoint_id=tmp_path / "ours")
    assert loaded["model"]["w"].equal(state["model"]["w"])
    assert (loaded["epoch"], loaded["list"][1]) == (3, "text")
    assert torch.equal(loaded["list"][0], torch.ones(2))
    export(tmp_path / "checkpoints", "safetensors", tmp_path / "hf").well()
    equal(load_file(tmp_path / "hf" / "model.safetensors"), {"w": state["model"]["w"]})


def test_safetensors_are_written_where_torch_is_not_installed(sharded: Path, tmp_path: Path) -> None:
    without = (
        "import sys; sys.modules['torch'] = None\n"
        "from tiercheck_cli.main import main\n"
        "sys.argv = ['tiercheck', 'export', '--folder', sys.argv[1], '--format', sys.argv[2], '--to', "
        "sys.argv[3]]\n"
        "sys.exit(main())"
    )
    for form, status in (("safetensors", 0), ("dcp", 1)):
        words = [sys.executable, "-c", without, str(sharded), form, str(tmp_path / form)]
        ran = subprocess.run(words, capture_output=True, text=True, check=False, timeout=100)
        assert ran.returncode == status, ran.stderr
    assert "torch is not installed" in ran.stderr
    assert (tmp_path / "safetensors" / "model.safetensors").exists()


def test_assembling_by_slabs_gives_what_reading_at_once_gives() -> None:
    tensor = WholeTensor(
        "F32", (10, 3), (Chunk(0, Box((0, 0), (10, 1)), 0, 40), Chunk(1, Box((0, 1), (10, 2)), 0, 80))
    )
    content = [bytes(range(40)), bytes(range(100, 180))]

    class Fake:
        slots = tuple(
            SavedArtifact("", len(each), 16, lambda i, n, each=each: each[16 * i : 16 * i + n])
            for each in content
        )

    parts = [bytes(read_box(Fake, tensor, box)) for box in slabs(tensor, 40)]  # type: ignore[arg-type]
    assert len(parts) == 4
    assert b"".join(parts) == bytes(read_box(Fake, tensor, Box.whole((10, 3))))  # type: ignore[arg-type]
    rows = [content[0][4 * row : 4 * row + 4] + content[1][8 * row : 8 * row + 8] for row in range(10)]
    assert b"".join(parts) == b"".join(rows)


def begun(folder: Path, state: dict[str, Any] | None = None) -> tuple[nn.Module, torch.optim.Optimizer, int]:
    torch.manual_seed(99)
    model = model_of_the_run()
    optimizer = optimizer_of_the_run(model)
    with Checkpointer(model, optimizer, folder=folder, state=state, every=1) as checkpointer:
        step = checkpointer.restore()
        optimizer.zero_grad()
        before = {name: value.clone() for name, value in model.state_dict().items()}
        kept = {
            name: {k: v.clone() for k, v in optimizer.state[p].items()}
            for name, p in model.named_parameters()
        }
        model(torch.ones(2, 9)).sum().backward()
        optimizer.step()  # what was imported can be trained, and saved again
        checkpointer.step()
        checkpointer.wait()
        assert checkpointer.captured == 1
    model.load_state_dict(before)
    for name, parameter in model.named_parameters():
        optimizer.state[parameter] = kept[name]
    return model, optimizer, step


def test_exported_and_imported_as_dcp_a_run_goes_on_where_it_was(
    sharded: Path, restored: tuple[nn.Module, torch.optim.Optimizer], tmp_path: Path
) -> None:
    plain, seeded = tmp_path / "plain", tmp_path / "seeded"
    assert export(sharded, "dcp", plain).status == 0
    ran = import_(plain, "dcp", seeded, "--step", "40").well()
    assert "weights and optimizer" in ran.err
    position = {"samples": 0}
    model, optimizer, step = begun(seeded, {"position": position})
    assert (step, position) == (40, {"samples": 24})
    equal(dict(model.state_dict()), dict(restored[0].state_dict()))
    for mine, theirs in zip(model.parameters(), restored[0].parameters(), strict=True):
        equal(optimizer.state[mine], restored[1].state[theirs])


class Scaled(nn.Linear):
    """Keeps what torch splits into items of its own beside its weights, and more in a list."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.extra: dict[str, Any] = {"scale": torch.zeros(2), "history": {}, "steps": [0]}

    def get_extra_state(self) -> dict[str, Any]:
        return self.extra

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.extra = state


def test_extra_state_of_modules_comes_back_from_an_exported_folder(tmp_path: Path) -> None:
    def begin(folder: Path, extra: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        model = nn.Sequential(Scaled())
        optimizer = torch.optim.AdamW(model.parameters())
        with Checkpointer(model, optimizer, folder=folder, every=1) as checkpointer:
            step = checkpointer.restore()
            model(torch.ones(2)).sum().backward()
            model[0].extra = extra or model[0].extra
            optimizer.step()
            checkpointer.step()
        return step, model[0].extra

    extra = {"scale": torch.ones(2), "history": {"amax": 2.5, "seen": {"1": "a"}}, "steps": [1, 2]}
    begin(tmp_path / "saved", extra)
    assert export(tmp_path / "saved", "dcp", tmp_path / "plain").status == 0
    import_(tmp_path / "plain", "dcp", tmp_path / "seeded", "--step", "40").well()
    step, found = begin(tmp_path / "seeded")
    assert step == 40
    assert torch.equal(found.pop("scale"), extra.pop("scale"))
    assert found == extra


def test_rate_of_an_optimizer_without_state_comes_back_from_an_exported_folder(tmp_path: Path) -> None:
    def begin(folder: Path, rate: float) -> float:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        with Checkpointer(model, optimizer, folder=folder, every=1) as checkpointer:
            checkpointer.restore()
            model(torch.ones(2)).sum().backward()
            optimizer.step()
            checkpointer.step()
        return float(optimizer.param_groups[0]["lr"])

    begin(tmp_path / "saved", 0.25)
    assert export(tmp_path / "saved", "dcp", tmp_path / "plain").status == 0
    assert "weights and optimizer" in import_(tmp_path / "plain", "dcp", tmp_path / "seeded").well().err
    assert begin(tmp_path / "seeded", 0.5) == 0.25


def test_keys_that_torch_makes_text_of_are_named(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    rates = torch.optim.lr_scheduler.MultiStepLR(optimizer, [30, 60])
    for name, state in (
        ("steps", {"rates": rates, "seen": {"a": {"b": 1}}}),
        ("plain", {"seen": {"a": [1]}}),
    ):
        with Checkpointer(model, optimizer, state=state, folder=tmp_path / name, every=1) as checkpointer:
            checkpointer.restore()
            model(torch.ones(2)).sum().backward()
            optimizer.step()
            checkpointer.step()
        said = export(tmp_path / name, "dcp", tmp_path / f"{name}-dcp").well().err
        assert ("the keys of state.rates.milestones are not text" in said) == (name == "steps")
        assert ("set these anew after restore()" in said) == (name == "steps")


def test_weights_from_safetensors_begin_a_run_with_a_fresh_optimizer(tmp_path: Path) -> None:
    torch.manual_seed(3)
    weights = model_of_the_run().state_dict()
    (tmp_path / "hf").mkdir()
    names = list(weights)
    save_file(
        {name: weights[name] for name in names[:3]}, tmp_path / "hf" / "model-00001-of-00002.safetensors"
    )
    save_file(
        {name: weights[name] for name in names[3:]}, tmp_path / "hf" / "model-00002-of-00002.safetensors"
    )
    import_(tmp_path / "hf", "safetensors", tmp_path / "seeded").well()
    position = {"samples": 5}
    model, optimizer, step = begun(tmp_path / "seeded", {"position": position})
    assert (step, position) == (1, {"samples": 5})
    equal(dict(model.state_dict()), dict(weights))
    assert all(not optimizer.state[parameter] for parameter in model.parameters())
    again = import_(tmp_path / "hf", "safetensors", tmp_path / "seeded")
    assert "holds versions already" in again.err


def test_a_remote_tier_is_seeded_and_exported_from(tmp_path: Path) -> None:
    torch.manual_seed(3)
    weights = dict(model_of_the_run().state_dict())
    hf, shared, tier = tmp_path / "hf", tmp_path / "shared", ("--job", "team-a/gpt")
    hf.mkdir()
    shared.mkdir()
    save_file(weights, hf / "model.safetensors")
    import_(hf, "safetensors", shared, *tier, "--step", "7").well()
    assert "holds versions already, up to step 7" in import_(hf, "safetensors", shared, *tier).err
    place = ("export", "--remote", str(shared), *tier, "--format", "safetensors", "--to")
    run(*place, str(tmp_path / "again")).well()
    equal(load_file(tmp_path / "again" / "model.safetensors"), weights)
    artifact = next(shared.rglob("rank-0.safetensors"))
    content = bytearray(artifact.read_bytes())
    content[-100_000] ^= 1
    artifact.write_bytes(content)
    assert "does not match its digest" in run(*place, str(tmp_path / "bad")).err
    assert not (tmp_path / "bad").exists()


class Malicious:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (str(self.path), "w")


def test_places_are_named_as_people_know_them() -> None:
    assert json.loads(settings_of_url("s3://bucket/a/b/", None, "eu-1")) == {
        "s3": {"bucket": "bucket", "prefix": "a/b", "region": "eu-1"}
    }
    more = "addressing=Virtual&requesterPays=true&encryption.type=SSE-KMS&encryption.kmsKeyId=arn:aws:k"
    assert json.loads(settings_of_url(f"s3://bucket/a?{more}", None, None)) == {
        "s3": {
            "bucket": "bucket",
            "prefix": "a",
            "addressing": "Virtual",
            "requesterPays": True,
            "encryption": {"type": "SSE-KMS", "kmsKeyId": "arn:aws:k"},
        }
    }
    with pytest.raises(CannotDo, match=r"no requester.*requesterPays"):
        settings_of_url("s3://bucket?requester=true", None, None)
    with pytest.raises(CannotDo, match="is no remote tier"):
        settings_of_url("https://bucket/x", None, None)
    job: dict[str, Any] = {
        "metadata": {"name": "gpt"},
        "spec": {"tiers": {"remote": {"s3": {"bucket": "b", "x": 1, "storageClass": "STANDARD_IA"}}}},
    }
    assert json.loads(settings_of_job(job)) == {"s3": {"bucket": "b", "storageClass": "STANDARD_IA"}}
    del job["spec"]["tiers"]["remote"]["s3"]["storageClass"]
    # From outside, the bucket may have another address than from inside the cluster.
    assert json.loads(settings_of_job(job, "https://outside:9000", "eu-1")) == {
        "s3": {"bucket": "b", "endpoint": "https://outside:9000", "region": "eu-1"}
    }
    job["spec"]["tiers"]["remote"] = {"directory": {"volume": {}}}
    with pytest.raises(CannotDo, match="mount it here"):
        settings_of_job(job)
    del job["spec"]["tiers"]
    with pytest.raises(CannotDo, match="has no remote tier"):
        settings_of_job(job)


def test_importing_runs_no_code_that_came_along(tmp_path: Path) -> None:
    folder = tmp_path / "plain"
    dcp.save({"model": {"w": torch.ones(2), "bad": Malicious(tmp_path / "hacked")}}, checkpoint_id=folder)
    assert "model.bad cannot be read" in import_(folder, "dcp", tmp_path / "seeded").err
    (folder / ".metadata").write_bytes(pickle.dumps(Malicious(tmp_path / "hacked")))
    assert "does not belong there" in import_(folder, "dcp", tmp_path / "seeded").err
    assert not (tmp_path / "hacked").exists()
    assert not (tmp_path / "seeded").exists()


class Crooked:
    """Pickled as torch's metadata with parts of another kind."""

    def __init__(self, state: Any) -> None:
        self._state = state

    def __reduce__(self) -> Any:
        return Metadata, (self._state,)


@pytest.mark.parametrize(
    "state", [None, 5, "x", [1], {1: 2}, {"a": None}, {"model.w": TensorStorageMetadata(None, None, [])}]
)
def test_metadata_that_is_none_is_a_sentence(tmp_path: Path, state: Any) -> None:
    (tmp_path / "dcp").mkdir()
    for content in (pickle.dumps(Crooked(state)), b"\x80\x05K\x01.", b"\x80\x05}K\x01R.", b"", b"\xff" * 100):
        (tmp_path / "dcp" / ".metadata").write_bytes(content)
        ran = import_(tmp_path / "dcp", "dcp", tmp_path / "seeded")
        assert ran.status > 0, "and no traceback"


@pytest.mark.parametrize(
    "content",
    [
        b"", b"1234567", struct.pack("<Q", 2**62) + b"{}", struct.pack("<Q", 2**64 - 1),
        struct.pack("<Q", 2) + b"[]", struct.pack("<Q", 6000) + b"[" * 6000,
        *(
            struct.pack("<Q", len(text)) + text + bytes(64)
            for text in (
                b'{"w":{"dtype":"F32","shape":[4],"data_offsets":[0,1e400]}}',
                b'{"w":{"dtype":"F32","shape":[-4],"data_offsets":[0,16]}}',
                b'{"w":{"dtype":"F32","shape":[4],"data_offsets":[-16,0]}}',
                b'{"w":{"dtype":"F32","shape":[4],"data_offsets":[]}}', b'{"w":null}',
                b'{"w":{"dtype":"F32","shape":[4611686018427387904],"data_offsets":[0,16]}}',
                b'{"w":{"dtype":[],"shape":[4],"data_offsets":[0,16]}}',
            )
        ),
    ],
)  # fmt: skip
def test_weights_with_a_header_of_nonsense_are_a_sentence(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "model.safetensors").write_bytes(content)
    ran = import_(tmp_path / "hf", "safetensors", tmp_path / "seeded")
    assert (ran.status, "cannot be read" in ran.err) == (1, True)


@pytest.mark.parametrize(
    "record",
    [
        b"", b"[]", b"null", b"[" * 5000, b'{"size":64,"chunk":0,"crc32":[]}',
        b'{"size":64,"chunk":-1,"crc32":[1]}', b'{"size":-64,"chunk":64,"crc32":[1]}',
        b'{"size":1e400,"chunk":64,"crc32":[1]}',
        b'{"size":1000000000000000000,"chunk":1000000000000000000,"crc32":[1]}',
        b'{"size":64,"chunk":64,"crc32":5}',
        b'{"size":64,"chunk":64,"crc32":[]}', b'{"size":"64","chunk":"64","crc32":[1]}',
        b'{"size":64,"chunk":64,"crc32":"x"}', b'{"chunk":"\xff"}',
    ],
)  # fmt: skip
def test_a_record_of_nonsense_is_a_sentence(tmp_path: Path, record: bytes) -> None:
    rank = tmp_path / "saved" / "rank-0-of-1"
    rank.mkdir(parents=True)
    (rank / "000000000005-1.safetensors").write_bytes(bytes(64))
    (rank / "000000000005-1.json").write_bytes(record)
    ran = export(tmp_path / "saved", "dcp", tmp_path / "new")
    assert ran.status == 1
    assert "rank-0-of-1" in ran.err.replace("\n", "")


def _tensor_metadata(size: Any, chunks: Any) -> TensorStorageMetadata:
    return TensorStorageMetadata(TensorProperties(torch.float32), size, chunks)


@pytest.mark.parametrize(
    "odd",
    [
        Metadata(state_dict_metadata=3),  # type: ignore[arg-type]
        Metadata({"model.w": None}, storage_data=None),  # type: ignore[dict-item]
        Metadata({"model.w": None}, storage_data={}),  # type: ignore[dict-item]
        Metadata({"model.w": _tensor_metadata(torch.Size([2]), 7)}, storage_data={}),
        Metadata({"model.w": _tensor_metadata(["two"], [])}, storage_data={}),
        Metadata({"model.w": _tensor_metadata(torch.Size([2]), [])}, planner_data=5, storage_data={}),
        Metadata({5: BytesStorageMetadata()}, storage_data={}),  # type: ignore[dict-item]
        Metadata({"state.x": BytesStorageMetadata()}, planner_data={"state.x": ()}, storage_data={}),
    ],
    ids=range(8),
)
def test_odd_metadata_ends_an_import_with_a_sentence(tmp_path: Path, odd: Metadata) -> None:
    folder = tmp_path / "plain"
    folder.mkdir()
    (folder / ".metadata").write_bytes(pickle.dumps(odd))
    ran = import_(folder, "dcp", tmp_path / "seeded")
    assert ran.status == 1
    assert ran.err.startswith("error: ")
    assert "Traceback" not in ran.err
