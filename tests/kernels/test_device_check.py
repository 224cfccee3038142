"""The arithmetic and the bookkeeping of the GPU check, on machines without a GPU.

The kernels themselves run here in the interpreter; the times are made up by a device that is not there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kernels import device_check, gpu_bench, gpu_cases, gpu_stages
from kernels.device_check import Stage, StageResult, all_right, as_json, as_text, check, run_stage
from kernels.gpu_bench import Timing
from kernels.gpu_decode import KERNELS, DecodeStep, Layout, Pool, decode_step
from kernels.gpu_device import Work, median_seconds
from kernels.interpreter import interpret
from refengine.commands.engine_speed import speed_rows

CPU = torch.device("cpu")
SMALL = Layout(num_kv_heads=2, group=2, head_dim=64, block_size=16, dtype=torch.float32)


class MadeUpDevice:
    """Runs work on the CPU and tells the times that it was given: one per call of the work, in seconds."""

    name = CPU

    def __init__(self, seconds: float = 1e-3, free: int = 1 << 40, l2: int = 0) -> None:
        self.one, self.free, self.l2_bytes = seconds, free, l2
        self.calls, self.captures = 0, 0

    def free_bytes(self) -> int:
        return self.free

    def captured(self, work: Work) -> Work:
        work()
        self.captures += 1
        return work

    def seconds(self, work: Work, repeats: int) -> float:
        work()  # once is enough for what it does
        self.calls += repeats
        return self.one

    def host_seconds(self, work: Work, repeats: int) -> float:
        work()
        return self.one / 2


# Times and what is made of them


def test_short_work_is_repeated_and_the_median_of_the_rounds_counts() -> None:
    device = MadeUpDevice(seconds=1e-3)
    assert median_seconds(device, lambda: None) == 1e-3
    assert device.calls == 1 + 5 * 30  # rounds of 30 ms

    times = iter([0.1, 0.5, 0.1, 0.2, 0.3, 9.0])
    device.seconds = lambda work, repeats: next(times)  # type: ignore[method-assign]
    assert median_seconds(device, lambda: None) == 0.3


def test_a_copy_reads_and_writes() -> None:
    assert gpu_bench.copy_bandwidth(MadeUpDevice(seconds=1e-6), num_bytes=1000) == pytest.approx(2e9)
    assert gpu_bench.copy_bandwidth(MadeUpDevice(seconds=1e-6, free=1000)) == pytest.approx(8e8)  # what fits


def test_bandwidth_is_bytes_of_the_cache_over_time() -> None:
    row = Timing("split", 8, 1024, seconds=1e-3, kv_bytes=3_000_000_000, num_sets=1).row(copy_bandwidth=4e12)
    assert row["bandwidth"] == pytest.approx(3e12)
    assert row["share_of_copy"] == pytest.approx(0.75)


def test_the_bytes_of_a_block() -> None:
    assert Layout().block_bytes == 2 * 16 * 8 * 128 * 2  # keys and values, bf16
    assert Layout().blocks(1024) == 64 and Layout().blocks(1025) == 65


def test_sets_of_blocks_are_disjoint_and_as_many_as_make_the_cache_cold() -> None:
    pool = Pool(MadeUpDevice(), SMALL, num_blocks=40)
    tables = pool.tables(num_seqs=2, context=50, cold_bytes=24 * SMALL.block_bytes)
    assert [list(t.shape) for t in tables] == [[2, 4]] * 3  # 8 blocks a set
    used = torch.cat(tables).flatten().tolist()
    assert len(set(used)) == len(used) == 24
    assert len(pool.tables(2, 50, cold_bytes=1000 * SMALL.block_bytes)) == 5  # no more than there are
    assert len(pool.tables(2, 50, cold_bytes=0)) == 1


def counting(calls: list[DecodeStep]) -> Callable[[DecodeStep], Work]:
    return lambda step: lambda: calls.append(step)


def test_a_row_per_kernel_and_size_with_the_time_of_one_launch() -> None:
    calls: list[DecodeStep] = []
    device = MadeUpDevice(seconds=6e-3, l2=4 * SMALL.block_bytes)
    rows = list(gpu_bench.decode_rows(device, 1e12, {"a": counting(calls)}, SMALL, (1, 2), (32, 64)))
    assert [(r["kernel"], r["num_seqs"], r["context"]) for r in rows] == [
        ("a", 1, 32),
        ("a", 1, 64),
        ("a", 2, 32),
        ("a", 2, 64),
    ]
    assert [r["num_sets"] for r in rows] == [8, 4, 4, 2]  # four times the L2 cache, 16 blocks
    assert [r["seconds"] for r in rows] == pytest.approx([6e-3 / 8, 6e-3 / 4, 6e-3 / 4, 6e-3 / 2])
    assert rows[0]["kv_bytes"] == 2 * SMALL.block_bytes
    assert device.captures == 4
    assert {tuple(step.block_tables.flatten().tolist()) for step in calls if len(step.out) == 2}
    assert json.loads(json.dumps(rows)) == rows


def test_a_size_that_does_not_fit_is_skipped_and_one_that_fails_leaves_the_others() -> None:
    def broken(step: DecodeStep) -> Work:
        raise RuntimeError("no such instruction")

    free = int(10 * SMALL.block_bytes * 2 / gpu_bench.FREE_SHARE) + 1
    kernels = {"broken": broken, "fine": counting([])}
    rows = list(gpu_bench.decode_rows(MadeUpDevice(free=free), 1e12, kernels, SMALL, (1,), (160, 176)))
    assert rows[0]["error"] == "RuntimeError: no such instruction"
    assert "share_of_copy" in rows[1]
    assert [set(r) - {"kernel", "num_seqs", "context"} for r in rows[2:]] == [{"skipped"}, {"skipped"}]
    assert "GB of free memory" in rows[2]["skipped"]


def test_launches_are_timed_for_the_host_and_in_a_graph() -> None:
    def broken() -> None:
        raise RuntimeError("no")

    rows = list(gpu_bench.launch_rows(MadeUpDevice(1e-3), {"a": lambda: None, "b": broken}, launches=10))
    assert rows == [
        {"kernel": "a", "eager_seconds": 5e-4, "graph_seconds": 1e-4},
        {"kernel": "b", "error": "RuntimeError: no"},
    ]


def test_the_kernels_that_are_timed_compute_the_same() -> None:
    pool = Pool(MadeUpDevice(), SMALL, num_blocks=12)
    step = decode_step(pool, pool.tables(2, 48, 0)[0], 48)
    results = {}
    for name, kernel in KERNELS.items():
        step.out.fill_(torch.nan)
        with interpret():
            kernel(step)()
        results[name] = step.out.clone()
    for name in ("plain", "split"):
        torch.testing.assert_close(results[name], results["torch gather + SDPA"], atol=1e-5, rtol=1e-5)


# Right or not


def test_every_kernel_number_format_and_group_has_a_case() -> None:
    names = [case.name for case in gpu_cases.CASES]
    assert len(set(names)) == len(names)
    for kernel in ("cache write", "copy blocks", "plain", "split", "varlen"):
        for dtype in ("float32", "float16", "bfloat16"):
            assert any(name.startswith(kernel) and f", {dtype}" in name for name in names), (kernel, dtype)
    for group in (1, 2, 4, 8):
        for head_dim in (64, 128, 256):
            assert any(f"split, bfloat16, head_dim {head_dim}, group {group}," in name for name in names)


@pytest.mark.parametrize("case", [c for c in gpu_cases.CASES if c.allowed == 0], ids=lambda c: c.name)
def test_writes_and_copies_pass_in_the_interpreter(case: gpu_cases.Case) -> None:
    with interpret():
        assert case.row(CPU) == {"case": case.name, "passed": True, "worst": 0.0, "allowed": 0}


@pytest.mark.parametrize(
    ("kernel", "shape", "lengths"),
    [
        ("plain", gpu_cases.Shape(torch.float16, 16, 3, 5), ((1, 1), (1, 11))),
        ("split", gpu_cases.Shape(torch.bfloat16, 64, 2, 16), ((1, 1), (1, 17), (1, 40))),
        ("varlen", gpu_cases.Shape(torch.float32, 64, 1, 8), ((2, 10),)),
    ],
)
def test_attention_passes_in_the_interpreter(
    kernel: str, shape: gpu_cases.Shape, lengths: tuple[tuple[int, int], ...]
) -> None:
    with interpret():
        worst = gpu_cases.worst_attention(kernel, shape, lengths, CPU)
    assert 0 < worst <= gpu_cases.ALLOWED[shape.dtype]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("case", gpu_cases.CASES, ids=lambda c: c.name)
def test_every_case_passes_on_the_gpu(case: gpu_cases.Case) -> None:
    row = case.row(torch.device("cuda", 0))
    assert row["passed"], row


def test_wrong_unwritten_and_failing_are_not_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = ((1, 9),)
    shape = gpu_cases.Shape(torch.float32, 16, 1, 8)
    monkeypatch.setattr(gpu_cases.cuda, "paged_attention_decode", lambda *args, **kwargs: None)
    assert gpu_cases.worst_attention("plain", shape, lengths, CPU) == float("inf")
    monkeypatch.setattr(gpu_cases.cuda, "reshape_and_cache", lambda *args, **kwargs: None)
    assert gpu_cases.worst_write(torch.float32, CPU) > 0

    def fail(device: torch.device) -> float:
        raise ValueError("no")

    assert gpu_cases.Case("c", fail, 1.0).row(CPU) == {
        "case": "c",
        "passed": False,
        "error": "ValueError: no",
    }
    assert gpu_cases.Case("c", lambda device: 2.0, 1.0).row(CPU)["passed"] is False
    assert gpu_cases.Case("c", lambda device: float("nan"), 1.0).row(CPU)["passed"] is False


# Stages


def test_each_stage_gets_its_limit_or_what_is_left() -> None:
    now = [0.0]
    asked = []

    def run(stage: Stage, limit: float) -> StageResult:
        asked.append((stage.name, limit))
        now[0] += 40
        return StageResult(stage.name, "ok", 40)

    heard: list[StageResult] = []
    stages = [Stage("a", 60), Stage("b", 60), Stage("c", 60), Stage("d", 60)]
    results = check(stages, 83, run, clock=lambda: now[0], tell=heard.append)
    assert asked == [("a", 60), ("b", 43)]
    assert [r.status for r in results] == ["ok", "ok", "not run", "not run"]
    assert results[2].error == "the budget of 83 s was used up"
    assert heard == results


CHILD = """
import argparse, os, sys, time
parser = argparse.ArgumentParser()
parser.add_argument("--stage")
parser.add_argument("--rows")
options = parser.parse_args()
with open(options.rows, "w") as file:
    print('{"kernel": "a", "seconds": 0.5}', file=file, flush=True)
    if options.stage == "row fails":
        print('{"kernel": "b", "error": "no"}', file=file, flush=True)
    if options.stage == "hangs":
        print('{"kernel": "cut o', end="", file=file, flush=True)
        time.sleep(60)
    if options.stage == "raises":
        raise ValueError("broken")
    if options.stage == "dies":
        os.abort()
"""


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "a_stage_of_its_own.py").write_text(CHILD)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    yield "a_stage_of_its_own"


@pytest.mark.parametrize(
    ("name", "status", "error", "num_rows"),
    [
        ("fine", "ok", "", 1),
        ("row fails", "failed", "1 of 2 rows have an error", 2),
        ("hangs", "timed out", "ended after 2 s", 1),
        ("raises", "failed", "ValueError: broken", 1),
        ("dies", "failed", "exit status -6", 1),
    ],
)
def test_what_a_stage_had_is_kept_however_it_ends(
    child: str, name: str, status: str, error: str, num_rows: int
) -> None:
    result = run_stage(Stage(name, 60, child), limit=2 if name == "hangs" else 60)
    assert (result.name, result.status, len(result.rows)) == (name, status, num_rows)
    assert error in result.error
    assert result.rows[0] == {"kernel": "a", "seconds": 0.5}


PASSED, FAILED = {"case": "a", "passed": True}, {"case": "b", "passed": False}


@pytest.mark.parametrize(
    ("results", "right"),
    [
        ([], False),
        ([StageResult("correctness", "ok", rows=[PASSED])], True),
        ([StageResult("correctness", "ok", rows=[PASSED]), StageResult("decode", "failed")], True),
        ([StageResult("correctness", "ok", rows=[PASSED, FAILED])], False),
        ([StageResult("correctness", "ok", rows=[])], False),
        ([StageResult("correctness", "timed out", rows=[PASSED])], False),
        ([StageResult("correctness", "failed", rows=[PASSED])], False),
        ([StageResult("decode", "ok", rows=[PASSED])], False),
    ],
)
def test_right_means_that_the_whole_stage_ran_and_passed(results: list[StageResult], right: bool) -> None:
    assert all_right(results) is right
    assert as_json(results)["kernels_right"] is right


def test_the_json_has_a_schema_and_every_stage() -> None:
    result = StageResult(
        "decode", "timed out", 12.5, [{"kernel": "copy", "bandwidth": 4e12}], "ended after 12 s"
    )
    assert json.loads(json.dumps(as_json([result]))) == {
        "schema": device_check.SCHEMA,
        "kernels_right": False,
        "stages": [
            {
                "name": "decode",
                "status": "timed out",
                "seconds": 12.5,
                "rows": [{"kernel": "copy", "bandwidth": 4e12}],
                "error": "ended after 12 s",
            }
        ],
    }


def test_the_table_has_a_column_per_field_and_suitable_units() -> None:
    rows = [
        {"kernel": "copy", "bandwidth": 4.3e12},
        {"kernel": "split", "num_seqs": 64, "seconds": 1.5e-4, "bandwidth": 3.2e12, "share_of_copy": 0.744},
    ]
    assert as_text(StageResult("decode", "ok", 3.2, rows)).splitlines() == [
        "== decode (ok, 3 s)",
        "kernel  bandwidth   num_seqs  seconds   share_of_copy",
        "copy    4.300 TB/s",
        "split   3.200 TB/s  64        150.0 us  74%",
    ]
    assert as_text(StageResult("engine", "not run", error="no time")) == "== engine (not run, 0 s: no time)"


def test_without_a_gpu_it_says_so_and_runs_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device_check.main(["--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().out == "There is no CUDA device that torch can use, so no kernel was run.\n"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("status", "exit_status"), [("ok", 0), ("timed out", 1)])
def test_with_a_gpu_it_writes_both_files_and_its_exit_status_is_the_verdict(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, status: str, exit_status: int
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    results = [StageResult("correctness", status, 1.0, [PASSED])]

    def checked(stages: object, budget: float, tell: Callable[[StageResult], None]) -> list[StageResult]:
        assert budget == 10
        tell(results[0])
        return results

    monkeypatch.setattr(device_check, "check", checked)
    assert device_check.main(["--out", str(tmp_path), "--budget", "10"]) == exit_status
    assert json.loads((tmp_path / "device_check.json").read_text()) == as_json(results)
    text = (tmp_path / "device_check.txt").read_text()
    assert text.startswith("== correctness")
    assert ("NOT SHOWN" in text) is (exit_status == 1)


def test_a_stage_writes_each_row_as_it_comes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "rows"

    def rows() -> Iterator[dict[str, object]]:
        yield {"a": 1}
        assert path.read_text() == '{"a": 1}\n'
        yield {"a": 2}

    monkeypatch.setitem(gpu_stages.STAGES, "some", rows)
    device_check.write_rows("some", path)
    assert path.read_text() == '{"a": 1}\n{"a": 2}\n'


@pytest.fixture
def made_up_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimpleNamespace(
        name="H", major=9, minor=0, multi_processor_count=132, total_memory=10, L2_cache_size=5
    )
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setattr(gpu_stages, "CudaDevice", MadeUpDevice)
    monkeypatch.setattr(gpu_stages, "check_device", lambda device: None)


@pytest.mark.usefixtures("made_up_gpu")
def test_versions_are_said_and_what_is_missing_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_stages, "PACKAGES", ("torch", "no-such-package"))
    monkeypatch.setattr(gpu_stages, "LIBRARIES", ("nosuchlibrary",))
    monkeypatch.setattr(gpu_stages.shutil, "which", lambda name: None)
    found = {row["what"]: row["found"] for row in gpu_stages.versions()}
    assert found["torch"] == torch.__version__
    assert found["no-such-package"] == "not installed"
    assert found["libnosuchlibrary"].startswith("not found: ")
    assert found["driver"] == "unknown: there is no nvidia-smi"
    assert (found["GPU"], found["compute capability"], found["multiprocessors"]) == ("H", "9.0", 132)


@pytest.mark.usefixtures("made_up_gpu")
def test_the_stages_hand_on_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_bench, "copy_bandwidth", lambda device: 4e12)
    monkeypatch.setattr(gpu_bench, "decode_rows", lambda device, bandwidth: iter([{"given": bandwidth}]))
    assert list(gpu_stages.decode()) == [{"kernel": "copy", "bandwidth": 4e12}, {"given": 4e12}]

    monkeypatch.setattr(gpu_bench, "small_works", lambda device: {"a": lambda: None})
    assert [row["kernel"] for row in gpu_stages.launch()] == ["a"]

    monkeypatch.setattr(gpu_cases, "CASES", (gpu_cases.Case("c", lambda device: 0.5, 1.0),))
    assert [row["passed"] for row in gpu_stages.correctness()] == [True]


def test_the_smallest_works_can_be_run() -> None:
    with interpret():
        works = gpu_bench.small_works(MadeUpDevice(), SMALL)
        for work in works.values():
            work()
    assert list(works) == ["torch add", "plain", "split", "torch gather + SDPA"]


def test_all_stages_exist_and_their_limits_leave_room() -> None:
    assert [stage.name for stage in device_check.STAGES] == [
        "versions",
        "correctness",
        "decode",
        "launch",
        "engine",
    ]
    assert set(gpu_stages.STAGES) == {
        s.name for s in device_check.STAGES if s.module == "kernels.device_check"
    }
    assert device_check.BUDGET < 360


def test_the_engine_stage_has_a_row_for_both_generations() -> None:
    rows = list(speed_rows("cpu", batches=(1, 2), new_tokens=3))
    assert [(row["engine"], row["batch"], row["same_as_cpu"]) for row in rows] == [
        ("v0", 1, True),
        ("v0", 2, True),
        ("v1", 1, True),
        ("v1", 2, True),
    ]
    assert all(row["tokens_per_second"] == pytest.approx(3 * row["batch"] / row["seconds"]) for row in rows)
    failed = list(speed_rows("nowhere"))
    assert [row["engine"] for row in failed] == ["v0", "v1"]
    assert all("device 'nowhere'" in row["error"] for row in failed)
