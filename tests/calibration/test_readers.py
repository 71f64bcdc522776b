"""Reading traces, nccl-tests and tables: counts are the emulator's, and what cannot be used is counted by reason."""

from __future__ import annotations

import gzip
import json
import pickle
import re
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from pipeloom.calibration import Evidence, blend, other_device, read_evidence
from pipeloom.errors import InputError
from pipeloom.spec.catalog import load_device
from tests.calibration.documents import Trace, nccl_output

H100 = load_device("h100")
GEMM = [("nvjet_tst_128x256_64x4", 500.0)]


def write(folder: Path, name: str, text: str) -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


def read(folder: Path, name: str, text: str, **more) -> Evidence:
    return read_evidence([write(folder, name, text)], H100, **more)


def reasons(evidence: Evidence) -> Counter[str]:
    found: Counter[str] = Counter()
    for (_, reason), count in evidence.unusable.items():
        found[reason] += count
    return found


def kinds(evidence: Evidence) -> list[str]:
    return sorted(one.measurement.kind for one in evidence.observations)


# Tables of kernels


def test_rows_of_every_kind_are_read(tmp_path):
    table = """\
kind,m,n,k,batch,heads,kv_heads,head_dim,seq,causal,direction,dtype,rows,width,bytes,collective,ranks,nodes,us
gemm,4096,8192,4096,,,,,,,,bfloat16,,,,,,,400
attention,,,,2,32,8,128,4096,1,forward,bf16,,,,,,,400
attention,,,,2,32,8,128,4096,0,backward,bf16,,,,,,,2500
rms_norm,,,,,,,,,,forward,bf16,8192,4096,,,,,60
memory,,,,,,,,,,,,,,1000000000,,,,400
collective,,,,,,,,,,,,,,268435456,all_reduce,8,,1200
collective,,,,,,,,,,,,,,268435456,all_gather,16,2,9000
"""
    evidence = read(tmp_path, "kernels.csv", table)
    assert not evidence.unusable
    assert kinds(evidence) == [
        "all_gather@16",
        "all_reduce@8",
        "attention_backward@128",
        "causal_attention@128",
        "copy",
        "matmul",
        "norm",
    ]
    by_kind = {one.measurement.kind: one.measurement for one in evidence.observations}
    assert by_kind["matmul"].flops == 2 * 4096 * 8192 * 4096
    assert by_kind["matmul"].seconds == pytest.approx(400e-6)
    extra = H100.efficiency["compute"]["causal_attention@128"].extra_keys
    per_key = 2 * 2 * 32 * 256 * 4096
    assert by_kind["causal_attention@128"].flops == per_key * (4097 / 2 + extra)
    assert by_kind["norm"].memory_bytes == 2 * 8192 * 4096 * 2
    assert by_kind["all_reduce@8"].network_bytes == pytest.approx(268435456 * 2 * 7 / 8)
    assert by_kind["all_reduce@8"].part == "nvlink"
    assert by_kind["all_gather@16"].part == "nic"
    assert not any(one.hot for one in evidence.observations)


@pytest.mark.parametrize(
    ("dtype", "num_bytes"),
    [("", 2), ("torch.float16", 2), ("torch.float32", 4), ("FP32", 4), ("float64", 8), ("fp8", 1), ("int3", None)],
)
def test_a_tensor_of_rows_has_the_bytes_of_its_precision(tmp_path, dtype, num_bytes):
    evidence = read(tmp_path, "kernels.csv", f"kind,rows,width,dtype,us\nnorm,8192,4096,{dtype},200\n")
    moved = [one.measurement.memory_bytes for one in evidence.observations]
    assert moved == ([] if num_bytes is None else [2 * 8192 * 4096 * num_bytes])
    assert [*reasons(evidence)] == (["precision int3, whose bytes are not known"] if num_bytes is None else [])


def test_attention_needs_its_mask_and_a_column_says_what_clocks_were_sustained(tmp_path):
    table = "kind,heads,seq,head_dim,causal,backend,sustained,ms\n"
    table += "attention,32,2048,128,1.0,,0.0,1\nattention,32,1024,128,False,,1.0,1\nattention,32,512,128,1,,often,1\n"
    table += "attention,32,4096,128,,,,1\nattention,32,4096,128,1,flash2,1,1\nattention,32,4096,128,maybe,,,1\n"
    evidence = read(tmp_path, "attention.csv", table)
    assert [(one.measurement.kind, one.hot, one.flash2) for one in evidence.observations] == [
        ("causal_attention@128", False, False),
        ("attention@128", True, False),
        ("causal_attention@128", True, True),
    ]
    assert reasons(evidence) == {
        "sustained often, which is neither 0 nor 1": 1,
        "attention whose mask is not stated (causal: 0 or 1)": 1,
        "causal maybe, which is neither 0 nor 1": 1,
    }


def test_products_of_experts_are_a_kind_of_their_own(tmp_path):
    evidence = read(tmp_path, "grouped.csv", "groups,M,N,K,stage,us\n8,1024,3072,4096,fwd,400\n")
    (one,) = evidence.observations
    assert (one.measurement.kind, one.measurement.flops) == ("grouped_matmul", 2 * 8 * 1024 * 3072 * 4096)


def test_hosts_that_nvlink_joins_are_one_node(tmp_path):
    path = write(
        tmp_path, "log.txt", nccl_output([(1 << 28, 1500.0)], test="all_reduce", ranks=16, hosts=4, gpu="GB200")
    )
    (one,) = read_evidence([path], load_device("gb200")).observations
    assert one.measurement.part == "nvlink"


def test_columns_have_the_names_of_published_tables_too(tmp_path):
    table = "hardware,mask,batch,q_len,kv_len,heads,kv_heads,qk_dim,v_dim,pass_,ms,dtype\n"
    table += "H100,top_left,2,4096,4096,32,8,192,128,bwd,4.0,bfloat16\n"
    evidence = read(tmp_path, "cudnn.csv", table)
    assert kinds(evidence) == ["causal_attention_backward@192"]
    table = "gpu,collective,gpus,nodes,payload_bytes,time_us,busbw_GBps\nH100,all_reduce,8,1,1073741824,,400\n"
    (one,) = read(tmp_path, "nccl.csv", table).observations
    assert one.measurement.seconds == pytest.approx(1073741824 * 2 * 7 / 8 / 400e9)


@pytest.mark.parametrize(
    ("name", "share"),
    [
        ("all_reduce_perf", 2 * 7 / 8),
        ("AllReduce", 2 * 7 / 8),
        ("alltoall", 7 / 8),
        ("all_gather_perf", 7 / 8),
        ("sendrecv", 1),
    ],
)
def test_bus_bandwidths_are_those_of_nccl_tests_by_any_name(tmp_path, name, share):
    table = f"collective,ranks,bytes,busbw\n{name},8,1073741824,100\n"
    (one,) = read(tmp_path, "nccl.csv", table).observations
    assert one.measurement.seconds == pytest.approx(1073741824 * share / 100e9)


def test_the_documented_lines_of_torch_benchmark_are_a_table(tmp_path):
    rows = [{"kind": "gemm", "m": 4096, "n": 4096, "k": 4096, "dtype": "bfloat16", "seconds": 2.4e-4}]
    evidence = read(tmp_path, "benchmark.json", json.dumps(rows))
    assert kinds(evidence) == ["matmul"]


def test_headers_may_be_quoted_and_have_only_the_columns_that_are_needed(tmp_path):
    table = '\n"collective", "bytes" ,"ranks","busbw"\nall_reduce,1073741824,8,400\n'.lstrip()
    (one,) = read(tmp_path, "nccl.csv", "\ufeff" + table).observations
    assert one.measurement.seconds == pytest.approx(1073741824 * 2 * 7 / 8 / 400e9)
    evidence = read(tmp_path, "runs.csv", '"id","model","gbs","iteration_s"\nmine,Llama-3-8B,32,4.5\nother,,,\n')
    ((_, run),) = evidence.runs
    assert (run.id, run.gbs, run.measured_s) == ("mine", 32, 4.5)
    assert reasons(evidence) == {"run without its time": 1}


def test_kernels_may_have_ids(tmp_path):
    evidence = read(tmp_path, "gemm.csv", "id,m,n,k,seconds\nfirst,4096,4096,4096,3e-4\n")
    assert kinds(evidence) == ["matmul"]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("gemm,0,8,8,bf16,,1e-4", "size that is not a whole number"),
        ("gemm,-4,8,8,bf16,,1e-4", "size that is not a whole number"),
        ("gemm,2.5,8,8,bf16,,1e-4", "size that is not a whole number"),
        ("gemm,x,8,8,bf16,,1e-4", "m that is not a number"),
        ("gemm,nan,8,8,bf16,,1e-4", "m that is not a number"),
        ("gemm,1e30,8,8,bf16,,1e-4", "size that is not a whole number"),
        ("gemm,,8,8,bf16,,1e-4", "row without m"),
        ("gemm,4096,4096,4096,bf16,,0", "time that is not above 0"),
        ("gemm,4096,4096,4096,bf16,,-1", "time that is not above 0"),
        ("gemm,4096,4096,4096,bf16,,1e9", "time that is not above 0"),
        ("gemm,4096,4096,4096,bf16,,", "row without a time"),
        ("gemm,8192,8192,8192,bf16,,1e-5", "above 1.05 of the device's peak"),
        ("gemm,64,64,64,bf16,,2e-6", "shorter than the launch of a kernel"),
        ("gemm,4096,4096,4096,int8,,1e-3", "precision int8"),
        ("gemm,4096,4096,4096,float32,,1e-3", "precision float32"),
        ("gemm,4096,4096,4096,nvfp4,,1e-3", "precision nvfp4"),
        ("gemm,4096,4096,4096,bf16,NVIDIA A100-SXM4-80GB,1e-3", "another device (NVIDIA A100-SXM4-80GB)"),
        ("gemm,4096,4096,4096,bf16,NVIDIA H100 PCIe,1e-3", "another device (NVIDIA H100 PCIe)"),
        ("scan,4096,4096,4096,bf16,,1e-3", "kind scan, which calibrate does not read"),
        ("gemm,4096,4096,4096,float64,,1e-3", "precision float64, for which the table has no rate"),
        ("gemm,4096,4096,4096,bf16,one CPU thread,1e-3", "another device (one CPU thread)"),
    ],
)
def test_rows_that_cannot_be_used_are_counted_by_reason(tmp_path, row, reason):
    table = f"kind,m,n,k,dtype,device,seconds\n{row}\ngemm,4096,4096,4096,bf16,,3e-4\n"
    evidence = read(tmp_path, "kernels.csv", table)
    assert kinds(evidence) == ["matmul"]
    ((found, count),) = reasons(evidence).items()
    assert reason in found
    assert count == 1


def test_a_row_that_is_cut_off_or_too_long_does_not_stop_the_others(tmp_path):
    table = "kind,m,n,k,seconds\ngemm,4096\ngemm,4096,4096,4096,3e-4,7,8\n\x00\ngemm,8192,4096,4096,6e-4\n"
    evidence = read(tmp_path, "kernels.csv", table)
    assert len(evidence.observations) == 2
    assert sum(evidence.unusable.values()) == 2


# nccl-tests


def test_output_of_nccl_tests_has_the_emulators_bytes(tmp_path):
    text = nccl_output([(1 << k, 20 + (1 << k) / 2e5) for k in range(20, 31)], test="all_reduce")
    evidence = read(tmp_path, "log.txt", text)
    assert not evidence.unusable
    assert kinds(evidence) == ["all_reduce@8"] * 11
    largest = max(evidence.observations, key=lambda one: one.measurement.amount).measurement
    assert largest.network_bytes == pytest.approx(2**30 * 2 * 7 / 8)
    # The shorter of the times out of place and in place.
    assert largest.seconds == pytest.approx((20 + 2**30 / 2e5) * 1e-6)


def test_several_outputs_in_one_file_and_words_before_rows(tmp_path):
    first = nccl_output([(1 << 28, 1500.0)], test="all_gather", ranks=4)
    second = nccl_output([(1 << 28, 9000.0)], test="reduce_scatter", ranks=16, hosts=2)
    text = "".join(f"[1,0]<stdout>:{line}\n" for line in (first + second).splitlines())
    evidence = read(tmp_path, "slurm.out", text)
    assert kinds(evidence) == ["all_gather@4", "reduce_scatter@16"]
    assert {one.measurement.kind: one.measurement.part for one in evidence.observations} == {
        "all_gather@4": "nvlink",
        "reduce_scatter@16": "nic",
    }


def test_the_name_of_the_file_and_the_bandwidths_stand_for_a_header(tmp_path):
    text = re.sub(r"#  Rank.*\n", "", nccl_output([(1 << 28, 1000.0)]))
    assert kinds(read(tmp_path, "all_reduce_perf-8.txt", text)) == ["all_reduce@8"]
    with pytest.raises(InputError, match="name the file all_reduce_perf"):
        blend(H100, read(tmp_path, "log.txt", text))


def test_tests_on_other_devices_and_damaged_rows_are_counted(tmp_path):
    good = nccl_output([(1 << 28, 1500.0)], test="all_reduce")
    other = nccl_output([(1 << 28, 1500.0)], test="all_reduce", gpu="NVIDIA A100-SXM4-80GB")
    unknown = nccl_output([(1 << 28, 1500.0)], test="broadcast")
    cut = "   268435456      67108864     float     sum\n"
    evidence = read(tmp_path, "log.txt", good + other + unknown + cut)
    assert len(evidence.observations) == 1
    assert reasons(evidence) == {
        "measured on another device (NVIDIA A100-SXM4-80GB)": 1,
        "collective broadcast, which the emulator does not have": 1,
        "line that is not a row of nccl-tests": 1,
    }


# Traces


def training_trace(gpu: str = "NVIDIA H100 80GB HBM3") -> Trace:
    trace = Trace(gpu)
    trace.operator("aten::mm", [[8192, 4096], [4096, 4096]], [("nvjet_tst", 460.0)])
    trace.operator(
        "aten::addmm", [[4096], [8192, 4096], [4096, 14336], [], []], [("nvjet_a", 900.0), ("splitK", 700.0)]
    )
    trace.operator("aten::bmm", [[16, 2048, 1024], [16, 1024, 2048]], [("nvjet_b", 300.0)])
    queries, keys = [2, 32, 4096, 128], [2, 8, 4096, 128]
    values = ["", "", "", "0.", "True", "False"]
    trace.operator(
        "aten::_scaled_dot_product_flash_attention",
        [queries, keys, keys, [], [], []],
        [("void pytorch_flash::flash_fwd_kernel<...>", 700.0)],
        values=values,
        inside="aten::_flash_attention_forward",
    )
    dims = [queries, queries, keys, keys, queries, [2, 32, 4096], [], [], [], [], [], [], [], [], [], []]
    values = ["" for _ in dims]
    values[14] = "False"
    trace.operator(
        "aten::_scaled_dot_product_cudnn_attention_backward",
        dims,
        [("cudnn_generated_fort_native_sdpa_sm90_flash_bprop", 2500.0)],
        values=values,
    )
    trace.operator("aten::native_layer_norm", [[8192, 4096], [], [4096], [4096], []], [("layer_norm", 60.0)])
    trace.collective("_allgather_base", (1 << 24, 1 << 27), 900.0, range(8))
    return trace


def test_kernels_have_the_shapes_of_the_operators_around_their_launch(tmp_path):
    evidence = read(tmp_path, "trace.json", training_trace().text)
    assert not evidence.unusable
    assert all(one.hot for one in evidence.observations)
    by_flops = {one.measurement.kind: one for one in evidence.observations}
    assert kinds(evidence) == [
        "all_gather@8",
        "attention_backward@128",
        "causal_attention@128",
        *["matmul"] * 3,
        "norm",
    ]
    assert by_flops["causal_attention@128"].flash2
    assert not by_flops["attention_backward@128"].flash2
    products = sorted(one.measurement.flops for one in evidence.observations if one.measurement.kind == "matmul")
    assert products == [2 * 16 * 2048 * 1024 * 2048, 2 * 8192 * 4096 * 4096, 2 * 8192 * 4096 * 14336]
    # The kernels of one operator are its time together.
    times = sorted(one.measurement.seconds for one in evidence.observations)
    assert times == pytest.approx([60e-6, 300e-6, 460e-6, 700e-6, 900e-6, 1600e-6, 2500e-6])
    assert by_flops["all_gather@8"].measurement.network_bytes == pytest.approx((1 << 28) * 7 / 8)


def test_repeats_are_one_observation_and_collectives_keep_the_shortest_time(tmp_path):
    trace = Trace()
    for us in (440.0, 500.0, 900.0):
        trace.operator("aten::mm", [[8192, 4096], [4096, 4096]], [("nvjet", us)])
        trace.collective("allreduce", (1 << 26, 1 << 26), us, range(8))
    evidence = read(tmp_path, "trace.json", trace.text)
    by_kind = {one.measurement.kind: one.measurement for one in evidence.observations}
    assert by_kind["matmul"].seconds == pytest.approx(500e-6)
    assert by_kind["all_reduce@8"].seconds == pytest.approx(440e-6)


@pytest.mark.parametrize("name", ["aten::mul", "aten::add"])
@pytest.mark.parametrize(
    ("left", "right", "tensors"),
    [
        ([16, 4096, 3072], [16, 4096, 3072], 3),
        ([16, 4096, 3072], [16, 1, 3072], 2),
        ([16, 4096, 3072], [3072], 2),
        ([16, 4096, 3072], [], 2),
        ([16, 4096, 1], [16, 1, 3072], 1),
    ],
)
def test_sums_and_products_move_tensors_of_their_results_size(tmp_path, name, left, right, tensors):
    for number, dims in enumerate(([left, right], [right, left])):
        trace = Trace()
        trace.operator(name, dims, [("elementwise_kernel", 900.0)])
        (one,) = read(tmp_path, f"trace{number}.json", trace.text).observations
        assert one.measurement.memory_bytes == tensors * 2 * 16 * 4096 * 3072


def test_compressed_traces_and_groups_across_nodes_are_read(tmp_path):
    trace = Trace()
    trace.collective("allreduce", (1 << 28, 1 << 28), 30000.0, [0, 8, 16, 24])
    trace.collective("allreduce", (1 << 28, 1 << 28), 3000.0, [0, 1, 2, 3])
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(trace.text.encode()))
    evidence = read_evidence([path], H100)
    assert sorted(one.measurement.part for one in evidence.observations) == ["nic", "nvlink"]
    evidence = read_evidence([path], H100, per_node=72)
    assert {one.measurement.part for one in evidence.observations} == {"nvlink"}


def test_kernels_that_cannot_be_used_are_counted(tmp_path):
    trace = training_trace()
    trace.operator("aten::sum", [[8192, 4096]], [("reduce_kernel", 40.0)])
    trace.operator("aten::mm", [[8192, 4096], [4096, 4096]], [("nvjet", 500.0)], shapes=False)
    trace.operator("aten::mm", [[8192], []], [("nvjet", 500.0)])
    trace.operator("aten::mm", [[8192, 4096], [4096, 4096]], [("gemm", 500.0)], dtype="float")
    beside = trace.at_us
    trace.collective("allreduce", (1 << 26, 1 << 26), 900.0, range(8), at_us=beside)
    trace.operator("aten::mm", [[8192, 8192], [8192, 4096]], [("nvjet", 900.0)], at_us=beside + 100)
    trace.collective("all_to_allv", (1 << 26, 1 << 26), 900.0, range(8))
    evidence = read(tmp_path, "trace.json", trace.text)
    assert len(evidence.observations) == 8
    assert reasons(evidence) == {
        "kernel of an operator that calibrate does not read": 1,
        "kernel without shapes; record with record_shapes=True": 1,
        "operator whose recorded shapes do not have the expected form": 1,
        "precision float, for which the table has no rate": 1,
        "kernel that ran beside a collective, which slows both": 1,
        "all-to-all of uneven parts": 1,
    }


def test_a_trace_of_another_device_is_refused_by_its_properties_or_its_kernels(tmp_path):
    with pytest.raises(InputError, match=r"trace of torch.profiler.*another device \(NVIDIA B200\)"):
        blend(H100, read(tmp_path, "trace.json", training_trace("NVIDIA B200").text))
    trace = training_trace("")
    trace.operator("aten::mm", [[8192, 4096], [4096, 4096]], [("cutlass3x_sm100_bf16_gemm", 300.0)])
    with pytest.raises(InputError, match=r"newer device \(kernel cutlass3x_sm100"):
        blend(H100, read(tmp_path, "other.json", trace.text))


def test_a_trace_of_the_cpu_has_no_kernels(tmp_path):
    torch = pytest.importorskip("torch")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as run:
        torch.mm(torch.ones(8, 8), torch.ones(8, 8))
    path = tmp_path / "cpu.json"
    run.export_chrome_trace(str(path))
    with pytest.raises(InputError, match="trace without kernels: of a CPU"):
        blend(H100, read_evidence([path], H100))


# Files


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("x.txt", b"hello\nworld\n", "begins with 'hello world'"),
        ("x.csv", b"", "begins with 'nothing'"),
        ("x.csv", b"a,b,c\n1,2,3\n", "begins with 'a,b,c 1,2,3'"),
        ("x.json", b'{"a": 1}', "is not a trace of torch.profiler"),
        ("x.json", b'{"traceEvents": [', "is not complete JSON"),
        ("x.json", b'{"traceEvents": []}', "trace without kernels"),
        ("x.json", b"[1, 2]", "is not a trace of torch.profiler"),
        ("x.pkl", pickle.dumps({"median": 1.0}), "is a pickle, which can run code"),
        ("x.csv", b"PK\x03\x04zip", "is a zip archive"),
        ("x.csv", b"kind,m,n,k,seconds\n", "has nothing usable"),
        ("x.csv", b"\xff\xfe\x00kind", "is none of the known kinds"),
        ("x.csv", b"kind,m,n,k\ngemm,1,1,1\n", "is a table without a column of times (seconds, ms, us or ns)"),
        ("x.json", b'[{"kind": "gemm", "m": 1}, {"n": 1, "k": 1}]', "is a table without a column of times"),
        ("x.csv", b"kind,m,seconds\ngemm,1,1\n", "is a table without columns of sizes (m, n and k; heads"),
        ("x.csv", b"model,gbs,iteration_s\na,1,1\n", "is a table without the column id"),
        ("x.csv", b'kind,m,n,k,seconds\ngemm,64,64,64,"1' + b"\n" * 200_000, "is not CSV (field larger"),
        ("x.csv", b'"kind,m,n,k,seconds' + b"\n" * 200_000, "is not CSV (field larger"),
    ],
)
def test_a_file_without_anything_usable_is_one_clear_error(tmp_path, name, content, problem):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(InputError) as caught:
        blend(H100, read_evidence([path], H100))
    message = str(caught.value)
    assert problem in message
    assert name in message
    assert "give kernels with shapes, collectives with sizes, or measured iterations" in message
    assert "\n" not in message


def test_a_useless_file_beside_a_useful_one_is_counted(tmp_path):
    good = write(tmp_path, "good.csv", "kind,m,n,k,seconds\ngemm,4096,4096,4096,3e-4\n")
    bad = write(tmp_path, "bad.txt", "hello")
    evidence = read_evidence([good, bad], H100)
    assert len(evidence.observations) == 1
    assert list(evidence.unusable) == [(bad, "file that is none of the known kinds; it begins with 'hello'")]
    with pytest.raises(InputError, match="given twice"):
        read_evidence([good, good], H100)
    with pytest.raises(InputError, match="cannot be read"):
        read_evidence([good, tmp_path / "missing.csv"], H100)


@pytest.mark.parametrize(
    ("stated", "base", "other"),
    [
        ("NVIDIA H100 80GB HBM3", "h100", False),
        ("H100", "h100", False),
        ("NVIDIA H100 PCIe", "h100", True),
        ("NVIDIA H800", "h100", True),
        ("NVIDIA H200", "h20", True),
        ("NVIDIA GB200", "b200", True),
        ("NVIDIA GH200 480GB", "h200", True),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb", False),
        ("Tesla V100-SXM2-32GB", "a100", True),
        ("NVIDIA L40S", "l40s", False),
        ("something new", "h100", False),
        ("", "h100", False),
        ("one CPU thread", "h100", True),
        ("Intel Xeon CPU E5-2680 v4", "h100", True),
    ],
)
def test_other_devices_are_recognized(stated, base, other):
    assert other_device(stated, load_device(base)) == other


@pytest.mark.parametrize(("stated", "other"), [("a CPU", False), ("NVIDIA H100", True), ("something new", False)])
def test_a_gpu_is_another_device_than_a_cpu(stated, other):
    assert other_device(stated, msgspec.structs.replace(H100, name="one CPU thread")) == other
