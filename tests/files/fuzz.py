"""Made-up adapters, checkpoints and rankings, damaged or forged by chance, read in every way that there is.

    python tests/files/fuzz.py 10000 [seed]

Each input gives the right adapter or one `ValueError` that names the file, and the base stays as it was, bit for bit.
"""

from __future__ import annotations

import json
import random
import resource
import shutil
import struct
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any


sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import zstandard
from adapters import make
from peft import PeftModel
from peft.utils.hotswap import hotswap_adapter
from safetensors.torch import load_file, save_file
from tiny_models import build

from peft_surgical import DeltaBank, LayerRanking, convert_adapter, inspect_adapter, merge_checkpoint
from peft_surgical.files.check import add_header
from peft_surgical.files.checkpoint import Checkpoint
from peft_surgical.files.encodings import ENCODINGS


WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
KINDS = [("SURGICAL", encoding) for encoding in ("values", *ENCODINGS)]
KINDS += [("STRATIFIED", "values"), ("STRATIFIED", "lossless"), ("STRATIFIED", "int8")]
JUNK: list[Any] = [
    None, True, -1, 0, 3, 10**9, 10**30, -0.5, 1e308, float("nan"), "", "x", "/dev/zero", "(a+)+$", "(.*)*b", "[",
    [], [[]], [None], ["x"], [10**9], {}, {"x": 1}, {"": None}, {"(x+)+y": "z"}, {"encoder": [0, 0]}, [1, 1],
    "last:0%", {"num_labels": 10**9}, {"num_labels": "2"}, {"layers": 3}, {"tensors": {"x": "float32:@@"}},
    ["a"] * 1000,
]  # fmt: skip


class World:
    """What is damaged, and what reads it.

    Args:
        folder: Where to work.
    """

    def __init__(self, folder: Path):
        self.folder, self.target = folder, folder / "damaged"
        self.like = folder / "SURGICAL-values"  # a good one of the same method
        build("bert").save_pretrained(folder / "base")
        self.base = build("bert").requires_grad_(False)
        self.before = {name: tensor.clone() for name, tensor in self.base.state_dict().items()}
        self.values: dict[str, dict[str, torch.Tensor]] = {}
        for method, encoding in KINDS:
            name = f"{method}-{encoding}"
            make(method, "bert", [1, 3], encoding=encoding).save_pretrained(folder / name)
            self.values[name] = self.loaded(folder / name)
        LayerRanking("encoder", [0.1, 0.3, 0.2], intervals=[(0.0, 0.2)] * 3).save(folder / "ranking.json")

    def loaded(self, folder: Path) -> dict[str, torch.Tensor]:
        """What PEFT makes of an adapter's files, and that it is gone afterwards."""
        model = PeftModel.from_pretrained(self.base, str(folder))
        own = {id(tensor) for tensor in self.before.values()}
        found = {n: t.clone() for n, t in model.state_dict().items() if ".default" in n and id(t) not in own}
        self.base = model.unload()
        return found


# ---- ways to damage the two files; each tells whether someone made it on purpose, and made the checksums fit


def flip(rng: random.Random, path: Path) -> bool:
    data = bytearray(path.read_bytes())
    for _ in range(rng.choice([1, 1, 2, 30])):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)
    return False


def cut(rng: random.Random, path: Path) -> bool:
    data = path.read_bytes()
    at = rng.randrange(len(data))
    path.write_bytes(rng.choice([data[:at], data[:at] + bytes(rng.randrange(64)), data[at:], data + b"\0" * 7]))
    return False


def edit_header(rng: random.Random, path: Path) -> bool:
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    name = rng.choice([key for key in header if key != "__metadata__"])
    entry = header[name]
    match rng.randrange(7):
        case 0:
            entry["dtype"] = rng.choice(["I32", "F16", "BF16", "F64", "U8", "F8_E4M3", "F4", 3])
        case 1:
            entry["shape"] = rng.choice([[], [2**62, 2], [-1], [0], [10**30], "x", entry["shape"][::-1], [1] * 99])
        case 2:
            entry["data_offsets"] = rng.choice([[0, 0], [0, 2**62], [5, 1], [-4, 0], "x", next(iter(header.values()))])
        case 3:
            header[rng.choice(["x", "", "a:b:c", f"{name}:int8", name + "\ud800"])] = header.pop(name)
        case 4:
            header["__metadata__"]["peft_surgical"] = rng.choice(["", "{}", "[" * 5000, '{"base":1,"checksums":{}}'])
        case 5:
            header.pop("__metadata__")
        case 6:
            record = json.loads(header["__metadata__"]["peft_surgical"])
            record["base"]["tensors"] = rng.choice([[], {"x": 1}, {"x": "float32:zz"}, {"x": "int99:"}, {}])
            header["__metadata__"]["peft_surgical"] = json.dumps(record)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", rng.choice([len(text)] * 5 + [2**63, 0])) + text + data[8 + length :])
    return False


def forge(rng: random.Random, path: Path) -> bool:
    """What someone makes who knows the format: other tensors, with checksums that fit."""
    tensors, config = load_file(path), json.loads((path.parent / CONFIG).read_text())
    name = rng.choice(list(tensors))
    match rng.randrange(6):
        case 0:
            tensors[rng.choice(FOREIGN)] = torch.randn(99, 16)
        case 1:
            del tensors[name]
        case 2:
            tensors[name] = rng.choice(
                [torch.zeros(0), torch.zeros(3, 3), tensors[name].to(torch.int32), tensors[name][None]]
            )
        case 3:
            bomb = zstandard.ZstdCompressor(write_content_size=rng.random() < 0.5).compress(bytes(1 << 26))
            packed = torch.frombuffer(bytearray(b"float32".ljust(20) + bomb), dtype=torch.uint8)
            tensors = {(key if ":" in key else f"{key}:lossless"): packed.clone() for key in tensors}
        case 4:
            tensors[name] = torch.frombuffer(bytearray(rng.randbytes(64)), dtype=torch.uint8)
        case 5:
            tensors[name] = torch.full_like(tensors[name], rng.choice([0, 1, 100]))
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, path, metadata={"format": "pt"})
    config["saved"] = add_header(path, {})
    (path.parent / CONFIG).write_text(json.dumps(config))
    return True


FOREIGN = [
    f"base_model.model.bert.{name}" for name in ("embeddings.word_embeddings.weight", "pooler.dense.bias", "x.y")
]
FOREIGN += ["base_model.model.bert.embeddings.word_embeddings.base_layer.weight", "x", "", "classifier.weight"]


def edit_config(rng: random.Random, path: Path) -> bool:
    config_path = path.parent / CONFIG
    config = json.loads(config_path.read_text())
    for _ in range(rng.choice([1, 1, 2])):
        config[rng.choice(list(config))] = rng.choice(JUNK)
    config["kasa_config"] = None  # changes the base, as docs/security.md says
    config_path.write_text(json.dumps(config))
    return True


def other_text(rng: random.Random, path: Path) -> bool:
    config = (path.parent / CONFIG).read_text()
    nested = "[" * 100_000 + "]" * 100_000
    text = rng.choice(
        ["", "null", "[]", '"x"', nested, config[:-9], f'{{"base": {nested}, {config[1:]}', config + " " * 2**25]
    )
    (path.parent / CONFIG).write_text(text)
    return True


def flip_config(rng: random.Random, path: Path) -> bool:
    flip(rng, path.parent / CONFIG)
    return True  # a number may have become another one


DAMAGES = [flip, flip, cut, edit_header, edit_header, forge, forge, edit_config, edit_config, flip_config, other_text]


# ---- ways to read it


def by_peft(world: World, rng: random.Random) -> dict[str, torch.Tensor]:
    return world.loaded(world.target)


def beside_another(world: World, rng: random.Random) -> None:
    model = PeftModel.from_pretrained(world.base, str(world.like), "first")
    first = {name: tensor.clone() for name, tensor in model.state_dict().items() if ".first" in name}
    try:
        model.load_adapter(str(world.target), "default")
    finally:
        state = model.state_dict()
        assert all(torch.equal(state[name], tensor) for name, tensor in first.items()), "the other adapter changed"
        assert "default" in model.peft_config or not any(".default" in name for name in state), "a part of it is left"
        world.base = model.unload()


def by_hotswap(world: World, rng: random.Random) -> None:
    model = PeftModel.from_pretrained(world.base, str(world.like))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    try:
        hotswap_adapter(model, str(world.target), "default")
    except ValueError:
        assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items()), "half of it was swapped in"
        raise
    finally:
        world.base = model.unload()


def by_bank(world: World, rng: random.Random) -> None:
    bank = DeltaBank(build("bert"))
    bank.add("task", world.target)
    bank.activate("task")


def by_convert(world: World, rng: random.Random) -> None:
    convert_adapter(world.target, world.folder / "out", rng.choice(["values", "int8"]), base=world.folder / "base")


def by_merge(world: World, rng: random.Random) -> None:
    merge_checkpoint(world.folder / "base", world.target, world.folder / "out")


def by_inspect(world: World, rng: random.Random) -> None:
    str(inspect_adapter(world.target))


READERS = [by_peft] * 5 + [beside_another] * 2 + [by_hotswap, by_bank, by_bank, by_convert, by_merge, by_inspect]


# ---- one input


def one_input(world: World, seed: int) -> str:
    """Damage something and read it; gives what happened, in a word. Raises `AssertionError` where it is wrong."""
    rng = random.Random(seed)
    shutil.rmtree(world.target, ignore_errors=True)
    shutil.rmtree(world.folder / "out", ignore_errors=True)
    if rng.random() < 0.1:
        return _other_file(world, rng)
    kind = rng.choice(list(world.values))
    shutil.copytree(world.folder / kind, world.target)
    world.like = world.folder / f"{kind.partition('-')[0]}-values"
    damage, read = rng.choice(DAMAGES), rng.choice(READERS)
    is_forged = damage(rng, world.target / WEIGHTS)
    what = f"seed {seed}: {kind}, {damage.__name__}, {read.__name__}"
    try:
        found = read(world, rng)
        outcome = "read"
        wanted = world.values[kind]
        same = found is None or (
            found.keys() == wanted.keys() and all(torch.equal(found[n], wanted[n]) for n in found)
        )
        assert is_forged or same, f"{what}: other values"
    except ValueError as error:
        outcome = "refused"
        _require(str(world.target) in str(error), f"{what}: the file is not named: {error}")
        _require(not (world.folder / "out").exists(), f"{what}: something was written")
    except AssertionError:
        raise
    except Exception as error:
        raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error
    _check_base(world, what)
    return outcome


def _other_file(world: World, rng: random.Random) -> str:
    """The same for a checkpoint and a ranking."""
    is_ranking = rng.random() < 0.5
    if is_ranking:
        path = world.target.with_suffix(".json")
        shutil.copy(world.folder / "ranking.json", path)
    else:
        shutil.copytree(world.folder / "base", world.target)
        path = world.target / rng.choice(["config.json", "model.safetensors"])
    rng.choice([flip, cut])(rng, path)
    try:
        if is_ranking:
            str(LayerRanking.load(path))
        else:
            checkpoint = Checkpoint(world.target)
            for name in checkpoint:
                checkpoint[name]
        return "read"
    except ValueError as error:
        _require(path.stem in str(error) or str(world.target) in str(error), f"{path} is not named: {error}")
        return "refused"
    except Exception as error:
        raise AssertionError(f"{path.name}: {type(error).__name__}: {error}") from error


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise AssertionError(what)


def _check_base(world: World, what: str) -> None:
    after = world.base.state_dict()
    assert after.keys() == world.before.keys(), f"{what}: something was left in the base"
    assert all(torch.equal(after[name], tensor) for name, tensor in world.before.items()), f"{what}: the base changed"


def main(count: int, first: int = 0) -> None:
    """Try many inputs, and show what happened."""
    warnings.simplefilter("ignore")
    counts: Counter[str] = Counter()
    slowest = (0.0, 0)
    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder))
        for seed in range(first, first + count):
            started = time.perf_counter()
            try:
                counts[one_input(world, seed)] += 1
            except AssertionError as error:
                counts["wrong"] += 1
                print(str(error)[:500], flush=True)
                world.base = build("bert").requires_grad_(False)
            slowest = max(slowest, (time.perf_counter() - started, seed))
            if (seed + 1 - first) % 500 == 0:
                peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
                print(f"{seed + 1 - first}: {dict(counts)}, slowest {slowest}, peak {peak:.2f} GB", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
