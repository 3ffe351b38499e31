"""Runs tests on another release of torch: `try_torch.py FOLDER VERSION [arguments of pytest]`.

Makes a virtual environment in FOLDER, with that torch in front of everything that this Python has.
`TORCH_INDEX` in the environment is the URL of an index that has torch without CUDA. The wheels of PyPI need
gigabytes of CUDA libraries to be loaded at all: empty ones, made by gcc and binutils, stand in for them.
"""

import os
import re
import site
import subprocess
import sys
import venv
from collections import defaultdict
from pathlib import Path

CUDA = re.compile(
    r"_*(cuda|cublas|cudnn|cufft|curand|cusparse|cusolver|cuFile|cupti|nccl|nvrtc|nvJit|nvshmem)"
)
BODIES = {
    "cudaGetDeviceCount": "int cudaGetDeviceCount(int *count) { *count = 0; return 100; }",
    "cudaGetErrorString": 'const char *cudaGetErrorString(int error) { return "no CUDA here"; }',
    "cudaGetErrorName": 'const char *cudaGetErrorName(int error) { return "cudaErrorNoDevice"; }',
    "cudaGetLastError": "int cudaGetLastError(void) { return 0; }",
    "__cudaRegisterFatBinary": "void *__cudaRegisterFatBinary(void *of) { static void *no[64]; return no; }",
}
"""Functions that are called while torch is loaded; all others give 100, cudaErrorNoDevice."""


def output_of(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def stand_in_for_cuda(folder: Path) -> None:
    """Writes into torch/lib, where torch's libraries look first, each library that they need and lack."""
    libraries = sorted(folder.glob("*.so*"))
    missing = {name for one in libraries for name in re.findall(r"(\S+) => not found", output_of("ldd", one))}
    versions: dict[str, set[str]] = defaultdict(set)
    functions: dict[str, set[str]] = defaultdict(set)
    for one in libraries:
        for part in output_of("readelf", "-VW", one).split(" File: ")[1:]:
            versions[part.split()[0]].update(re.findall(r"Name: (\S+)", part))
    provider = {version: library for library in missing for version in versions[library]}
    for one in libraries:
        for line in output_of("nm", "-D", "--undefined-only", one).splitlines():
            name, _, version = line.split()[-1].partition("@")
            if CUDA.match(name) and (not version or version in provider):
                functions[provider.get(version, min(missing, default=""))].add(name)
    for library in missing:
        source, script = folder / f"{library}.c", folder / f"{library}.map"
        names = sorted(functions[library])
        source.write_text(
            "\n".join(BODIES.get(name, f"int {name}(void) {{ return 100; }}") for name in names)
        )
        script.write_text("\n".join(f"{each} {{ global: *; }};" for each in sorted(versions[library])))
        command = [
            "gcc",
            "-shared",
            "-fPIC",
            "-w",
            f"-Wl,-soname,{library}",
            f"-Wl,--version-script={script}",
        ]
        subprocess.run(
            [*command[: None if versions[library] else -1], "-o", folder / library, source], check=True
        )
    if missing:
        print(f"Empty libraries stand in for {', '.join(sorted(missing))}.", flush=True)


def main(folder: Path, version: str, *arguments: str) -> None:
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder)
    packages = folder / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
    beside = "; ".join(f"site.addsitedir({path!r})" for path in site.getsitepackages())
    (packages / "beside.pth").write_text(f"import site; {beside}\n")
    command = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(python),
        "install",
        "--quiet",
        "--no-deps",
        "--upgrade",
    ]
    if index := os.environ.get("TORCH_INDEX"):
        command += ["--index-url", index]
    subprocess.run([*command, f"torch=={version}"], check=True)
    stand_in_for_cuda(packages / "torch" / "lib")
    print(output_of(python, "-c", "import torch; print('Runs on torch', torch.__version__)"), flush=True)
    hidden = packages / "hidden.pth"
    hidden.unlink(missing_ok=True)
    if subprocess.run([python, "-c", "import torchao.optim"], capture_output=True, check=False).returncode:
        print("The pinned torchao does not start on this torch, and is hidden.", flush=True)
        hidden.write_text("import sys; sys.modules['torchao'] = None\n")
    os.execv(python, [str(python), "-m", "pytest", *arguments])


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute(), *sys.argv[2:])
