"""Files of evidence as users have them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

HEADER = """\
# nThread 1 nGpus 8 minBytes 1048576 maxBytes 1073741824 step: 2(factor) warmup iters: 5 iters: 20 graph: 0
#
# Using devices
"""
COLUMNS = """\
#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
"""


def nccl_output(
    rows: Sequence[tuple[int, float]],
    *,
    test: str = "",
    hosts: int = 1,
    gpu: str = "NVIDIA H100 80GB HBM3",
    ranks: int = 8,
) -> str:
    """Return the output of nccl-tests. Rows are sizes in bytes and microseconds."""
    named = f"# Collective test starting: {test}_perf\n" if test else ""
    devices = "".join(
        f"#  Rank {rank:2} Group  0 Pid  {900 + rank} on  node-{rank * hosts // ranks} device {rank % 8:2} [0x1] "
        f"{gpu}\n"
        for rank in range(ranks)
    )
    lines = [
        f"{size:12} {size // 4:13}     float     sum      -1 {us:8.2f} {size / us / 1e3:7.2f}"
        f" {size / us / 1e3 * 2 * (ranks - 1) / ranks:7.2f}      0 {us * 1.02:8.2f}    1.00    1.00      0\n"
        for size, us in rows
    ]
    end = "# Out of bounds values : 0 OK\n# Avg bus bandwidth    : 339.842\n#\n"
    return named + HEADER + devices + COLUMNS + "".join(lines) + end


class Trace:
    """Builds a trace of torch.profiler as PyTorch 2.13 writes it on a GPU."""

    def __init__(self, gpu: str = "NVIDIA H100 80GB HBM3") -> None:
        self.events: list[dict[str, Any]] = []
        self.gpu = gpu
        self.at_us = 1000.0

    def operator(
        self,
        name: str,
        dims: Sequence[Any],
        kernels: Sequence[tuple[str, float]],
        *,
        dtype: str = "c10::BFloat16",
        values: Sequence[str] = (),
        shapes: bool = True,
        inside: str = "",
        arguments: dict[str, Any] | None = None,
        stream: int = 7,
        at_us: float | None = None,
    ) -> None:
        """Add an operator and its kernels (name and microseconds). ``inside``: the operator that launches."""
        number = len(self.events) + 1
        args: dict[str, Any] = {"External id": number, "Record function id": 0, "Ev Idx": number}
        if shapes:
            args |= {"Input Dims": list(dims), "Input type": [dtype if each else "Scalar" for each in dims]}
            args["Concrete Inputs"] = list(values) or ["" for _ in dims]
        start, total = self.at_us, sum(us for _, us in kernels) + 20.0
        self._add("cpu_op", name, start, 12.0, args)
        if inside:
            self._add(
                "cpu_op",
                inside,
                start + 1,
                10.0,
                {"External id": number + 5000, **({"Input Dims": []} if shapes else {})},
            )
        at = start + 30 if at_us is None else at_us
        for i, (kernel, us) in enumerate(kernels):
            correlation = 70000 + len(self.events)
            self._add("cuda_runtime", "cudaLaunchKernel", start + 2 + i, 0.5, {"correlation": correlation})
            # Several versions write the correlation as the id of the operator.
            more = {"External id": correlation, "correlation": correlation, "device": 0, "stream": stream}
            self.events.append(
                {"ph": "X", "cat": "kernel", "name": kernel, "pid": 0, "tid": stream, "ts": at, "dur": us}
                | {"args": more | (arguments or {})}
            )
            at += us
        self.at_us += total + 50

    def collective(self, name: str, elements: tuple[int, int], us: float, ranks: Sequence[int], **more: Any) -> None:
        """Add a collective of NCCL. ``elements`` are those of input and output."""
        arguments = {
            "Collective name": name,
            "In msg nelems": elements[0],
            "Out msg nelems": elements[1],
            "Group size": len(ranks),
            "dtype": "BFloat16",
            "Process Group Name": "0",
            "Process Group Ranks": json.dumps(list(ranks)),
        }
        kernel = f"ncclDevKernel_{name}_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
        self.operator("record_param_comms", [], [(kernel, us)], arguments=arguments, stream=20, **more)

    def _add(self, category: str, name: str, ts: float, dur: float, args: dict[str, Any]) -> None:
        event = {"ph": "X", "cat": category, "name": name, "pid": 3, "tid": 3, "ts": ts, "dur": dur, "args": args}
        self.events.append(event)

    @property
    def text(self) -> str:
        """The trace as JSON."""
        devices = [{"id": 0, "name": self.gpu, "totalGlobalMem": 85899345920}] if self.gpu else []
        return json.dumps({"schemaVersion": 1, "deviceProperties": devices, "traceEvents": self.events})
