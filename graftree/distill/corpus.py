"""`Corpus`: what the LLM wrote, one safetensors file per batch of streams.

Shard i is a function of the LLM, the settings, the prompts and (seed, i) alone: a run that was killed goes on at the
first shard that is missing, and ends with the same corpus.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

from graftree.distill.files import read_metadata, read_tensors, write_tensors
from graftree.distill.streams import Script, Stream
from graftree.distill.writer import Writer, Written
from graftree.errors import Incompatible, InvalidArgument, Unavailable

_NAMES = ("token_ids", "roles", "top_ids", "top_log_probs")


@dataclass(frozen=True)
class CorpusSettings:
    """How a corpus is written.

    Attributes:
        streams: dialogues per shard, written in lockstep.
        length: tokens of each.
        top: most likely tokens kept per position.
        seed: of everything drawn.
        llm: identity of the LLM (`graftree.models.ssm.llm_identity`).
        prompts: digest of the prompts that were given, "" = none.
    """

    streams: int = 128
    length: int = 512
    top: int = 48
    seed: int = 0
    llm: str = ""
    prompts: str = ""

    def __post_init__(self) -> None:
        for name, low, high in (("streams", 1, 4096), ("length", 8, 1 << 16), ("top", 1, 4096), ("seed", 0, 1 << 31)):
            value = getattr(self, name)
            if not low <= value <= high:
                raise InvalidArgument(name, value, f"{low} to {high}")


class Corpus:
    """Shards in a directory.

    Args:
        directory: made when it is missing.
        settings: must be those of the shards that are there.

    Attributes:
        damaged: shards that cannot be read; they count as missing and are written again.

    Raises:
        Incompatible: a shard was written by another LLM or with other settings; names both.
        Unavailable: the directory cannot be made.
    """

    def __init__(self, directory: Path, settings: CorpusSettings) -> None:
        self.directory, self.settings = directory, settings
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise Unavailable(f"{directory} cannot be made: {error}") from error
        self._about = {key: str(value) for key, value in asdict(settings).items()}
        self.damaged: set[Path] = set()
        for path in self._paths():
            try:
                about = read_metadata(path)
            except Incompatible:
                self.damaged.add(path)
                continue
            for key, value in self._about.items():
                if about.get(key) != value:
                    raise Incompatible(
                        f"{path} was written with {key} {about.get(key)!r}, now it is {value!r}: "
                        f"take another DIR or --work, or delete {directory}"
                    )

    def __len__(self) -> int:
        """Shards there are, counted from the first without a gap."""
        count = 0
        while self._has(count):
            count += 1
        return count

    @property
    def shard_tokens(self) -> int:
        """Tokens of one shard, forced ones included."""
        return self.settings.streams * self.settings.length

    def write(
        self,
        writer: Writer,
        script: Script,
        shards: int,
        *,
        prompts: Sequence[Sequence[int]] = (),
        progress: Callable[[int], None] = lambda _: None,
    ) -> int:
        """Write what is missing of the first `shards` shards.

        Args:
            prompts: user turns as token lists, dealt to the shards in turn.
            progress: told the number of shards that are there.

        Returns:
            How many of the prompts dealt to what was written found no room in it.
        """
        left = 0
        for index in range(shards):
            if not self._has(index):
                seed = self.settings.seed * 1_000_003 + index
                dealt = iter(prompts[index::shards])
                streams = [Stream(script, Random(f"{seed}.{n}"), dealt) for n in range(self.settings.streams)]
                self._save(index, writer.write(streams, self.settings.length, seed))
                left += sum(1 for _ in dealt)
            progress(index + 1)
        return left

    def read(self, index: int) -> Written:
        """One shard. Raises Incompatible: it is damaged."""
        tensors = read_tensors(self._path(index))
        return Written(*(tensors[name] for name in _NAMES))

    def shards(self, indices: Sequence[int]) -> Iterator[Written]:
        """Some shards, one after another."""
        return (self.read(index) for index in indices)

    def _save(self, index: int, written: Written) -> None:
        path = self._path(index)
        write_tensors(path, {name: getattr(written, name) for name in _NAMES}, self._about)
        self.damaged.discard(path)

    def _has(self, index: int) -> bool:
        path = self._path(index)
        return path not in self.damaged and path.exists()

    def _path(self, index: int) -> Path:
        return self.directory / f"shard-{index:05d}.safetensors"

    def _paths(self) -> list[Path]:
        return sorted(self.directory.glob("shard-*.safetensors"))
