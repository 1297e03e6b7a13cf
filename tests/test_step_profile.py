"""The table of a step's kernels, from events made by hand."""

import pytest

from experiments.step_profile import kind_of, table
from pallas_kernels.measure import Event


def test_rows_add_up_to_the_span():
    events = [
        Event("gemm_fusion_dot_7", 100.0, 6.0),
        Event("decode_attention_3", 107.0, 2.0),
        Event("gemm_fusion_dot_12", 110.0, 8.0),
        Event("wrapped_add", 119.0, 1.0),
    ]
    rows = list(table(events, steps=2))
    assert [(row["kernel"], row["kind"], row.get("calls"), row["us"]) for row in rows] == [
        ("gemm_fusion_dot", "matmul", 1.0, 7.0),
        ("decode_attention", "attention", 0.5, 1.0),
        ("wrapped_add", "rest", 0.5, 0.5),
        ("(none)", "gap", None, 1.5),
    ]
    assert sum(row["us"] for row in rows) == pytest.approx((120 - 100) / 2)
    assert sum(row["share"] for row in rows) == pytest.approx(1)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_hsh_64x8", "matmul"),
        ("cache_update_kernel", "cache"),
        ("merge_splits", "attention"),
        ("norm_quant_1", "norm, activation"),
        ("loop_multiply_fusion", "rest"),
    ],
)
def test_kinds(name, kind):
    assert kind_of(name) == kind
