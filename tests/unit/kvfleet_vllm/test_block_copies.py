"""Blocks come back as they were, through the slots of a file, whatever the tensors look like."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from torch import Tensor

from kvfleet_vllm import block_copies
from kvfleet_vllm.block_copies import LayerBlocks, SlotStore
from kvfleet_vllm.block_moves import SharedStore
from kvfleet_vllm.cache_groups import NONE
from tests.support.devices import DEVICES, finish

BLOCKS = 6


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    count = torch.Size(shape).numel() * dtype.itemsize
    made = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return made.view(dtype).view(shape)


def caches(
    *shape: int, layers: int = 3, dtype: torch.dtype = torch.float32, seed: int = 0, device: str = "cpu"
) -> dict[str, Tensor]:
    """Parts of one storage, as vLLM has them."""
    whole = numbers(layers, *shape, dtype=dtype, seed=seed).to(device)
    return {f"layer.{at}": whole[at] for at in reversed(range(layers))}


@pytest.fixture
def shared_folder() -> Iterator[Path]:
    """In memory, which a GPU can pin."""
    with TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


def shared(path: Path, size: int) -> str:
    path.write_bytes(os.urandom(size))
    return str(path)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((BLOCKS, 2, 32, 8), torch.float32),
        ((BLOCKS, 3, 16, 10), torch.bfloat16),
        ((BLOCKS, 1, 2, 5), torch.uint8),  # words do not fit
        ((BLOCKS, 7, 1, 2), torch.bfloat16),
        ((2 * BLOCKS, 4, 8), torch.float16),  # the kernel's blocks are half as large
        ((BLOCKS, 6), torch.float8_e4m3fn),
    ],
)
def test_there_and_back(
    shared_folder: Path, shape: tuple[int, ...], dtype: torch.dtype, ranks: int, device: str
) -> None:
    ours = [caches(*shape, dtype=dtype, seed=rank, device=device) for rank in range(ranks)]
    blocks = [LayerBlocks(cache, BLOCKS) for cache in ours]
    size = sum(cache["layer.0"].nbytes * 3 for cache in ours) // BLOCKS  # of a slot
    assert ranks * blocks[0].block_bytes == size
    path = shared(shared_folder / "s", 20 * size)
    slots = [17, 3, 9]
    for rank, one in enumerate(blocks):
        one.copy([4, 1, 2], slots, SlotStore(SharedStore(path, 20), one, rank, ranks), save=True)
        finish(device)

    # As the interface says it, byte by byte.
    data = Path(path).read_bytes()
    for rank, cache in enumerate(ours):
        for at, block in enumerate([4, 1, 2]):
            start = slots[at] * size + rank * blocks[rank].block_bytes
            for name in sorted(cache):
                part = cache[name].reshape(BLOCKS, -1)[block].contiguous().view(torch.uint8)
                assert data[start : start + len(part)] == bytes(part.tolist())
                start += len(part)

    theirs = [caches(*shape, dtype=dtype, seed=50 + rank, device=device) for rank in range(ranks)]
    before = [{name: tensor.clone() for name, tensor in cache.items()} for cache in theirs]
    for rank, cache in enumerate(theirs):
        into = LayerBlocks(cache, BLOCKS)
        into.copy([0, 5, 3], slots, SlotStore(SharedStore(path, 20), into, rank, ranks), save=False)
        finish(device)
        for name, tensor in cache.items():
            got, had, want = (
                one.reshape(BLOCKS, -1).view(torch.uint8) for one in (tensor, before[rank][name], ours[rank][name])
            )
            assert torch.equal(got[[0, 5, 3]], want[[4, 1, 2]])
            assert torch.equal(got[[1, 2, 4]], had[[1, 2, 4]])
    assert Path(path).read_bytes() == data


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")
@pytest.mark.parametrize("staged", [1, 3000])
def test_on_a_gpu_in_several_rounds_and_whether_it_can_pin_the_memory_or_not(
    tmp_path: Path, shared_folder: Path, staged: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failure to pin stays in CUDA until somebody asks for it, who must not be vLLM."""
    monkeypatch.setattr(block_copies, "STAGED_BYTES", staged)
    ours, theirs = (caches(BLOCKS, 4, 8, seed=seed, device="cuda") for seed in (0, 1))
    for folder in (shared_folder, tmp_path):
        blocks, into = LayerBlocks(ours, BLOCKS), LayerBlocks(theirs, BLOCKS)
        store = SlotStore(SharedStore(shared(folder / "s", 9 * blocks.block_bytes), 9), blocks, 0, 1)
        assert store.words.is_pinned() or folder == tmp_path
        blocks.copy(range(BLOCKS), [8, 1, 5, 0, 2, 7], store, save=True)
        into.copy([3, 4, 5, 0, 1, 2], [8, 1, 5, 0, 2, 7], store, save=False)
        for name in ours:
            assert torch.equal(theirs[name][[3, 4, 5, 0, 1, 2]].view(torch.uint8), ours[name].view(torch.uint8))
            theirs[name].zero_()


def test_dimensions_may_be_in_another_order_and_layers_inside_a_block(tmp_path: Path) -> None:
    whole = numbers(BLOCKS, 2, 4, 32, 8, dtype=torch.int32)  # block, layer, head, token, number
    ours = {name: whole[:, at].transpose(1, 2) for at, name in enumerate("ab")}
    blocks = LayerBlocks(ours, BLOCKS)
    path = shared(tmp_path / "s", 8 * blocks.block_bytes)
    store = SlotStore(SharedStore(path, 8), blocks, 0, 1)
    blocks.copy([1], [6], store, save=True)
    want = whole[1].clone()
    assert sorted(Path(path).read_bytes()[6 * blocks.block_bytes :][: blocks.block_bytes]) == sorted(
        want.view(torch.uint8).flatten().tolist()
    )
    whole[1] = 0
    blocks.copy([4], [6], store, save=False)
    assert torch.equal(whole[4], want)


def test_a_tensor_that_layers_share_is_copied_once() -> None:
    one = numbers(BLOCKS, 4, 8)
    assert LayerBlocks({"a": one, "b": one}, BLOCKS).block_bytes == 4 * 8 * 4


@pytest.mark.parametrize("device", DEVICES)
def test_groups_share_rows_and_a_state_takes_its_padding_along(shared_folder: Path, device: str) -> None:
    """Two groups attend, one has states, of which a layer lies in the rows of the others and one beside them."""
    memory = [numbers(3, BLOCKS, 64, dtype=torch.uint8, seed=seed).to(device) for seed in (0, 1)]  # row, block, byte
    ours, theirs = (
        {
            **{f"{group}.{at}": one[at].view(torch.float32).view(BLOCKS, 4, 4) for at in (0, 1) for group in "ab"},
            **{f"state.{at}": one[at, :, :40].view(BLOCKS, 1, 1, 40) for at in (1, 2)},
        }
        for one in memory
    )
    blocks, into = LayerBlocks(ours, BLOCKS, 2), LayerBlocks(theirs, BLOCKS, 2)
    assert (blocks.block_bytes, blocks.slot_bytes) == (3 * 64, 2 * 3 * 64)
    store = SlotStore(SharedStore(shared(shared_folder / "s", 5 * blocks.slot_bytes), 5), blocks, 0, 1)
    before = memory[1].clone()
    blocks.copy([1, 2, 3, 4, 5, NONE], [4, 0, 2], store, save=True)
    into.copy([5, NONE, NONE, 0, 2, NONE], [4, 0, 2], store, save=False)
    finish(device)
    for block, want in enumerate((4, None, 5, None, None, 1)):
        assert torch.equal(memory[1][:, block], before[:, block] if want is None else memory[0][:, want])


@pytest.mark.parametrize(
    "tensors",
    [
        [numbers(2, BLOCKS, 4, 8)],  # K and V first
        [numbers(BLOCKS, 4, 16)[:, :, :8]],  # gaps
        [numbers(BLOCKS, 4, 16)[:, :, ::2]],
        [numbers(4, BLOCKS, 8).transpose(0, 1)],
        [numbers(BLOCKS, 4, 8), numbers(BLOCKS, 4, 16)],
        [numbers(BLOCKS, 64), numbers(BLOCKS * 64 - 32).as_strided((BLOCKS, 32), (64, 1))],  # no padding at the end
        [numbers(0, 4, 8)],
        [[numbers(BLOCKS, 4)]],
    ],
)
def test_what_cannot_be_moved_is_refused(tensors: list[Tensor]) -> None:
    with pytest.raises(ValueError, match=r"block|tensor"):
        LayerBlocks(dict(zip("abc", tensors, strict=False)), BLOCKS)


def test_a_file_with_holes_is_filled(tmp_path: Path) -> None:
    blocks, path = LayerBlocks(caches(BLOCKS, 4, 8), BLOCKS), tmp_path / "s"
    size = 1000 * blocks.block_bytes
    path.touch()
    os.truncate(path, size)
    SlotStore(SharedStore(str(path), 1000), blocks, 0, 1)
    assert path.stat().st_blocks * 512 >= size


def test_a_file_that_is_too_short_or_is_cut_later(tmp_path: Path) -> None:
    blocks = LayerBlocks(caches(BLOCKS, 4, 8), BLOCKS)
    path = shared(tmp_path / "s", 10 * blocks.block_bytes)
    for wrong in (SharedStore(path, 11), SharedStore(str(tmp_path / "none"), 4), SharedStore("a\0b", 4)):
        with pytest.raises((OSError, ValueError)):
            SlotStore(wrong, blocks, 0, 1)
    store = SlotStore(SharedStore(path, 10), blocks, 0, 1)
    store.check([0, 9])
    for slots in ([10], [-1]):
        with pytest.raises(ValueError, match="beyond"):
            store.check(slots)
    os.truncate(path, 10 * blocks.block_bytes - 1)
    with pytest.raises(OSError, match="less than"):
        store.check([0])


def test_nothing_is_left_open(tmp_path: Path) -> None:
    blocks = LayerBlocks(caches(BLOCKS, 4, 8), BLOCKS)
    path = shared(tmp_path / "s", 10 * blocks.block_bytes)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        SlotStore(SharedStore(path, 10), blocks, 0, 1)
    assert len(os.listdir("/proc/self/fd")) == before
    assert path not in Path("/proc/self/maps").read_text()
