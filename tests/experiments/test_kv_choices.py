"""Choices inside the KV policies are compared on the same requests."""

import json

from experiments.kv_choices import main


def test_each_question_has_two_answers(tmp_path, capsys):
    options = ["--requests", "40", "--pool-gib", "2", "--slots", "32", "--results", str(tmp_path), "--json"]
    assert main(options) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["complete"]
    rows = {(row["question"], row["answer"], row["quantile"]): row for row in result["rows"]}
    assert len(rows) == 10
    assert all(row["requests"] == 40 for row in rows.values())
    assert len({round(row["output_tokens_s"] * row["seconds"], -2) for row in rows.values()}) == 1
    assert rows["victim", "cheapest", None]["preempted"] > 0
    assert rows["victim", "newest", None] != rows["victim", "cheapest", None]
    for quantile in (0.5, 0.9):
        assert (
            rows["overflow", "scatter", quantile]["copied_pages"] == rows["overflow", "scatter", quantile]["moves"] == 0
        )
        moved = rows["overflow", "move", quantile]
        assert (moved["copied_pages"] > 0) == (moved["moves"] > 0)
        kept, compacted = rows["compaction", "none", quantile], rows["compaction", "free", quantile]
        assert compacted["held_mean"] >= kept["held_mean"]
