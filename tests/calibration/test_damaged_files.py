"""Damaged evidence: whatever a file contains, it is read as far as it goes or refused with a reason."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pipeloom.calibration import blend, read_evidence
from pipeloom.errors import InputError
from pipeloom.spec.catalog import load_device
from tests.calibration.documents import nccl_output
from tests.calibration.test_readers import training_trace

H100 = load_device("h100")
KERNELS = "kind,m,n,k,batch,heads,head_dim,seq,causal,collective,bytes,ranks,seconds\n"
KERNELS += (
    "gemm,4096,4096,4096,,,,,,,,,3e-4\nattention,,,,2,32,128,4096,1,,,,5e-4\n,,,,,,,,,all_reduce,268435456,8,2e-3\n"
)
DOCUMENTS = {
    "kernels.csv": KERNELS,
    "all_reduce_perf.txt": nccl_output([(1 << k, 20 + (1 << k) / 2e5) for k in range(20, 26)]),
    "trace.json": training_trace().text,
}
PIECES = st.sampled_from(
    [
        "",
        ",",
        "\n",
        '"',
        "-1",
        "0",
        "1e400",
        "nan",
        "9" * 400,
        "null",
        "[]",
        "{",
        "\x00",
        "\x1b[31m",
        "é",
        "[[[1]]]",
        "true",
    ]
)


@pytest.mark.parametrize("name", DOCUMENTS)
@given(places=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 40), PIECES), min_size=1, max_size=6))
@example(places=[(0.0, 18, ""), (0.349609375, 13, "\x1b[31m")])
def test_a_damaged_file_is_read_or_refused(name, places):
    text = DOCUMENTS[name]
    for share, length, piece in places:
        at = int(share * len(text))
        text = text[:at] + piece + text[at + length :]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_text(text)
        try:
            evidence = read_evidence([path], H100)
            device = blend(H100, evidence).device
        except InputError as error:
            problem = str(error)
        else:
            problem = ""
            assert device.basis == "blended"
            assert not any("\x1b" in reason or len(reason) > 200 for _, reason in evidence.unusable)
            times = [one.measurement.seconds for one in evidence.observations]
            assert all(0 < seconds < 1e3 for seconds in times)
        assert "\x1b" not in problem
        assert "\n" not in problem
