"""Facts about architectures, and the occupancy rule against numbers of the CUDA occupancy calculator."""

from __future__ import annotations

import dataclasses

import pytest

from codegen.arch import KIB, KNOWN, arch, from_compute_capability


@pytest.mark.parametrize(
    ("name", "block_kib", "sm_kib", "threads", "blocks"),
    [
        ("sm_80", 163, 164, 2048, 32),
        ("sm_86", 99, 100, 1536, 16),
        ("sm_87", 163, 164, 1536, 16),
        ("sm_89", 99, 100, 1536, 24),
        ("sm_90", 227, 228, 2048, 32),
        ("sm_90a", 227, 228, 2048, 32),
        ("sm_100", 227, 228, 2048, 32),
        ("sm_100a", 227, 228, 2048, 32),
        ("sm_103", 227, 228, 2048, 32),
        ("sm_103a", 227, 228, 2048, 32),
        ("sm_110", 227, 228, 1536, 24),
        ("sm_110a", 227, 228, 1536, 24),
        ("sm_120", 99, 100, 1536, 24),
        ("sm_120a", 99, 100, 1536, 24),
        ("sm_121", 99, 100, 1536, 24),
        ("sm_121a", 99, 100, 1536, 24),
    ],
)
def test_limits(name: str, block_kib: int, sm_kib: int, threads: int, blocks: int) -> None:
    known = arch(name)
    assert known.shared_bytes_per_block == block_kib * KIB
    assert known.shared_bytes_per_sm == sm_kib * KIB
    assert (known.max_threads_per_sm, known.max_blocks_per_sm) == (threads, blocks)
    assert known.registers_per_sm == 65536
    assert known.max_warps_per_sm * 32 == threads


def test_names_and_numbers_agree() -> None:
    for name, known in KNOWN.items():
        assert known.name == repr(known) == name
        assert name.rstrip("a") == f"sm_{known.major}{known.minor}"
        assert known.compute_capability == (known.major, known.minor)


def test_features() -> None:
    def having(feature: str) -> set[str]:
        assert feature in {field.name for field in dataclasses.fields(KNOWN["sm_80"])}
        return {name for name, known in KNOWN.items() if getattr(known, feature)}

    specific = {"sm_103a", "sm_110a", "sm_120a", "sm_121a"}
    hopper_on = {"sm_90", "sm_90a", "sm_100", "sm_100a", "sm_103", "sm_110", "sm_120", "sm_121"} | specific
    assert having("has_cp_async") == set(KNOWN)
    assert having("has_fp8_convert") == having("has_fp8_mma") == hopper_on | {"sm_89"}
    assert having("has_clusters") == having("has_pdl") == hopper_on
    assert having("has_wgmma") == {"sm_90a"}


def test_unknown_name_lists_known_ones() -> None:
    with pytest.raises(ValueError, match=r"unknown architecture 'sm_75'.*sm_80.*sm_90a"):
        arch("sm_75")


@pytest.mark.parametrize(
    ("capability", "name"),
    [
        ((8, 0), "sm_80"),
        ((8, 6), "sm_86"),
        ((8, 8), "sm_86"),  # not sm_87: an 8.8 device need not have its 163 KiB
        ((9, 0), "sm_90a"),
        ((9, 5), "sm_90"),  # sm_90a code runs on 9.0 only
        ((10, 0), "sm_100a"),
        ((10, 3), "sm_103a"),
        ((10, 7), "sm_100"),
        ((11, 0), "sm_110a"),
        ((12, 1), "sm_121a"),
        ((12, 0), "sm_120a"),
        ((12, 9), "sm_120"),
    ],
)
def test_from_compute_capability(capability: tuple[int, int], name: str) -> None:
    assert from_compute_capability(*capability).name == name


@pytest.mark.parametrize("capability", [(7, 5), (13, 0)])
def test_no_cubin_across_major_versions(capability: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=rf"{capability[0]}\.{capability[1]}.*sm_121"):
        from_compute_capability(*capability)


@pytest.mark.parametrize(
    ("name", "threads", "registers", "shared", "blocks"),
    [
        ("sm_90a", 256, 32, 0, 8),  # threads
        ("sm_90a", 32, 16, 0, 32),  # blocks
        ("sm_86", 32, 16, 0, 16),
        ("sm_90a", 256, 64, 0, 4),  # registers: 8 warps of each partition's 16384 / (64 * 32)
        ("sm_90a", 384, 168, 0, 1),  # 3 warps a partition at 168, 12 in all
        ("sm_90a", 1024, 65, 0, 0),  # 65 registers round up to 72: 28 warps, one block needs 32
        ("sm_80", 128, 33, 0, 12),  # 33 round up to 40: 12 warps a partition
        ("sm_90a", 128, 32, 227 * KIB, 1),  # shared memory
        ("sm_90a", 128, 32, 113 * KIB, 2),
        ("sm_90a", 128, 32, 113 * KIB + 1, 1),  # the system's 1 KiB of each block is what makes it one
        ("sm_90a", 128, 32, 227 * KIB + 1, 0),
        ("sm_120", 128, 32, 100 * KIB, 0),
        ("sm_90a", 1025, 16, 0, 0),
        ("sm_90a", 32, 256, 0, 0),
    ],
)
def test_occupancy(name: str, threads: int, registers: int, shared: int, blocks: int) -> None:
    assert arch(name).blocks_per_sm(threads, registers, shared) == blocks


def test_occupancy_refuses_nonsense() -> None:
    for arguments in ((0, 32, 0), (32, -1, 0), (32, 32, -1)):
        with pytest.raises(ValueError, match="no such block"):
            arch("sm_80").blocks_per_sm(*arguments)


@pytest.mark.parametrize("name", ["sm_80", "sm_86", "sm_90a", "sm_120"])
@pytest.mark.parametrize("blocks", [1, 2, 3, 5])
def test_least_shared_bytes(name: str, blocks: int):
    """An SM holds so many blocks of these bytes, and one more of a few less."""
    arch = KNOWN[name]
    found = arch.least_shared_bytes(blocks)
    assert arch.blocks_per_sm(32, 16, found) == blocks
    assert arch.blocks_per_sm(32, 16, found - 128) == blocks + 1
