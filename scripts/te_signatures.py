#!/usr/bin/env python
"""Compares the CPU kernels of TransformerEngine with its true native module: signatures and enumerations.

    python scripts/te_signatures.py --work .cache/te_native --json te_signatures.json

Downloads the source of `transformer_engine_torch` and the core library, compiles the module as one translation unit
without optimisation (no GPU and no nvcc are needed; about 800 MB and a few minutes), imports it, and compares what
`adapters/cpu/te_kernels.py` implements: the number of parameters of every kernel and the members of every enumeration.
Exit code 1 where they differ.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import inspect
import json
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path
from typing import Any

from megatron_overlap.config.resources import transformer_engine_folder

MODULE = "transformer_engine_torch"
NEEDED = ("nvidia-cuda-crt", "nvidia-cuda-cccl", "nvidia-cudnn-frontend", "nvidia-cublas")
"""Headers that torch's wheels lack, and the cuBLAS of the core library, which is newer than torch's."""

# Runs in a process of its own: the stand-in has the same name as the true module.
DESCRIBE = """
import ctypes, json, sys
for library in sys.argv[3:]:
    ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)  # before torch loads an older one, or one that the core cannot see
import torch
ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)
sys.path.insert(0, sys.argv[2])
import transformer_engine_torch as native
kernels, enums = {}, {}
for name, value in vars(native).items():
    if hasattr(value, "__members__"):
        enums[name] = {member: int(each) for member, each in value.__members__.items()}
    elif callable(value) and value.__doc__ and not isinstance(value, type):
        kernels[name] = value.__doc__.splitlines()[0]
print(json.dumps({"kernels": kernels, "enums": enums}))
"""


def main() -> int:
    """0: no difference; 1: a difference; 2: the module could not be built."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path(".cache/te_native"), help="folder of downloads and the build")
    parser.add_argument("--json", type=Path, help="write the result here")
    options = parser.parse_args()
    folder = transformer_engine_folder()
    if folder is None:
        parser.error("no TransformerEngine: run bash scripts/setup.sh te")
    sys.path.append(str(folder))
    version = importlib.metadata.version("transformer_engine")
    try:
        core, built = build(options.work.resolve(), version)
        first = sorted(built.glob("site/nvidia/*/lib/libcublas*.so.*"), reverse=True)  # cublasLt is needed by cublas
        first += sorted(nvidia_folder().glob("*/lib/libnvrtc.so.*")) + sorted(
            nvidia_folder().glob("*/lib/libcudart.so.*")
        )
        libraries = [*built.glob("site/nvidia/*/lib"), *nvidia_folder().glob("*/lib")]
        text = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", DESCRIBE, str(core), str(built), *map(str, first)],
            check=True,
            capture_output=True,
            text=True,
            env={**os.environ, "LD_LIBRARY_PATH": os.pathsep.join(map(str, libraries))},
        ).stdout
    except subprocess.CalledProcessError as error:
        print(f"{' '.join(map(str, error.cmd[:6]))} ...: exit code {error.returncode}\n{(error.stderr or '')[-4000:]}")
        return 2
    native = json.loads(text.splitlines()[-1])
    kernels, problems = compare(native)
    for problem in problems:
        print(problem)
    print(f"TransformerEngine {version}: {kernels} kernels and {len(native['enums'])} enumerations compared, ", end="")
    print(f"{len(problems)} differences")
    if options.json:
        result = {"transformer_engine": version, "kernels": kernels, "problems": problems, "command": sys.argv}
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if problems else 0


def build(work: Path, version: str) -> tuple[Path, Path]:
    """Downloads and compiles; returns the core library and the folder of the module."""
    import torch
    from torch.utils import cpp_extension

    work.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    release = ".".join(torch.version.cuda.split(".")[:1]) if torch.version.cuda else "13"
    target = ["install", "--no-deps", "--target", str(work / "site")]
    core = next(iter(work.glob("site/transformer_engine/**/libtransformer_engine.so")), None)
    if core is None:
        run([*pip, *target, f"transformer_engine_cu{release}=={version}", *NEEDED])
        core = next(work.glob("site/transformer_engine/**/libtransformer_engine.so"))
    source = work / f"{MODULE}-{version}"
    if not source.is_dir():
        sdist = f"{MODULE}=={version}"
        run([*pip, "download", "--no-deps", "--no-build-isolation", "--no-binary", ":all:", "--dest", str(work), sdist])
        with tarfile.open(work / f"{MODULE}-{version}.tar.gz") as archive:
            archive.extractall(work, filter="data")
    unit = work / "unit.cpp"
    files = sorted(source.glob("csrc/**/*.cpp"))
    unit.write_text("".join(f'#include "{file}"\n' for file in files))
    built = work / f"{MODULE}{sysconfig.get_config_var('EXT_SUFFIX')}"
    include = [*cpp_extension.include_paths(), *map(str, sorted(nvidia_folder().glob("*/include")))]
    include += map(str, sorted((work / "site").glob("nvidia/*/include")))
    include += [str(work / "site" / "include"), sysconfig.get_paths()["include"]]
    include += [
        str(source / each) for each in ("common_headers", "common_headers/common", "common_headers/common/include")
    ]
    include.append(str(source / "csrc"))  # last: it has a common.h too
    flags = ["-O0", "-g0", "-std=c++20", "-shared", "-fPIC", "-fvisibility=hidden", f"-DTORCH_EXTENSION_NAME={MODULE}"]
    libraries = [f"-L{Path(torch.__file__).parent / 'lib'}", "-ltorch", "-ltorch_python", "-ltorch_cpu", "-lc10"]
    if not built.exists():
        run(["c++", *flags, *(f"-I{each}" for each in include), str(unit), "-o", str(built), *libraries])
    return core, work


def nvidia_folder() -> Path:
    """Folder of the CUDA libraries and headers that torch's wheel depends on."""
    import torch

    return Path(torch.__file__).parents[1] / "nvidia"


def run(command: list[str]) -> None:
    subprocess.run(command, check=True, text=True, stderr=subprocess.PIPE)


def compare(native: dict[str, Any]) -> tuple[int, list[str]]:
    """The number of compared kernels, and one line for every difference."""
    from megatron_overlap.adapters.cpu import te_kernels, te_module

    module, problems = te_module.native_module(), []
    for name, kernel in te_kernels.KERNELS.items():
        signature = native["kernels"].get(name)
        if signature is None:
            problems.append(f"{name}: the native module has no such kernel")
            continue
        parameters = list(inspect.signature(kernel).parameters.values())
        if any(each.kind is each.VAR_POSITIONAL for each in parameters):
            continue
        expected = len(re.findall(r"\w+: ", signature.partition("->")[0]))
        if len(parameters) != expected:
            problems.append(f"{name}: {len(parameters)} parameters, the native kernel has {expected}: {signature}")
    for name, members in native["enums"].items():
        ours = getattr(module, name, None)
        if not hasattr(ours, "__members__"):
            continue
        found = {member: int(value) for member, value in ours.__members__.items()}
        differing = sorted(key for key, value in found.items() if members.get(key) != value)
        if differing:
            there = {key: members.get(key) for key in differing}
            problems.append(f"{name}: { ({key: found[key] for key in differing}) }, the native module has {there}")
    return len(te_kernels.KERNELS), problems


if __name__ == "__main__":
    sys.exit(main())
